"""`headway serve --dry-run`: what fits in memory, and the chunks and times to expect, without serving."""

from __future__ import annotations

import msgspec

from headway.core.clock import ManualClock
from headway.perf.latency.base import MAX_CHUNK, BatchLoad, solve_tokens
from headway.perf.latency.error_band import prefill_band
from headway.perf.latency.prefill_cache import PrefillCache
from headway.perf.latency.shard_exchange import ShardedModel
from headway.policy.iteration.efficient_chunks import reference_aim_s
from headway.policy.iteration.grouped_scheduler import GroupedScheduler
from headway.runtime.build.engine import assemble
from headway.runtime.build.engine_summary import summary
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore


def report(config: EngineConfig) -> str:
    """Load the model, measure it briefly, and return a description of the engine. Raises ConfigError like `serve`."""
    return "\n".join(described(loaded(config)))


def loaded(config: EngineConfig) -> EngineCore:
    """Return an assembled engine whose executor is closed: measured, without an event log, unable to compute."""
    core = assemble(msgspec.structs.replace(config, event_log=None), ManualClock())
    core.executor.close()
    return core


def described(core: EngineCore, prefills: bool = True) -> list[str]:
    """Return lines on what fits, and on chunks and times to expect. prefills: False for a decode instance."""
    info, scheduler = core.info, core.scheduler
    budget = reference_aim_s(scheduler.config, scheduler.latency)
    latency, groups = scheduler.latency, None
    if isinstance(scheduler, GroupedScheduler):
        shard = scheduler.shard_tokens
        # A prompt longer than a shard is spread over KV groups: predict with the exchange between them.
        latency = ShardedModel(latency, shard)
        share = f"{len(scheduler.groups)}, each with {scheduler.block_managers[0].total_tokens:,} of these tokens"
        groups = f"{share}; of one request a group holds {shard:,}, then another joins"
    lines = summary(info, groups)
    if not prefills:
        return lines
    lines += ["", "context so far   next chunk   prompt of this length takes, alone (error bar: P90)"]
    times = PrefillCache(latency, budget, max(scheduler.config.min_chunk, 16))
    past = 0
    while past < info.max_model_len:
        chunk, _ = solve_tokens(latency, BatchLoad(), past, MAX_CHUNK, budget)
        # The scheduler takes at least `min_chunk`, even over budget.
        chunk = min(max(chunk, scheduler.config.min_chunk), info.max_model_len - past)
        alone = times.total_s(past)
        band = prefill_band(latency, past) if past else None
        lines.append(f"{past:>14,}   {chunk:>10,}   {alone:>10.2f} s{f' {band.words()}' if band else ''}")
        # Context lengths 0, 1K, 4K, 16K, ...
        past = max(1024, past * 4)
    return lines
