"""One `EngineInfo` and one `EngineStats` for a whole cluster, merged from those of its instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from headway.core.errors import ConfigError
from headway.perf.hardware.utilisation import UtilisationBase
from headway.runtime.engine.protocol import EngineInfo, EngineStats

_SAME = ("model", "architecture", "dtype", "vocab_size", "parameters", "eos_token_ids")
_SUMMED = ("kv_tokens_total", "max_num_seqs", "max_queued_requests", "weights_bytes", "kv_bytes")
_NEWEST = ("last_chunk_tokens", "last_iteration_s")


def merged_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Merge the instances' reports; `max_model_len` is what every instance can hold.

    Raises ConfigError when they do not serve the same model.
    """
    first = infos[0]
    for i, info in enumerate(infos):
        for name in _SAME:
            if getattr(info, name) != getattr(first, name):
                raise ConfigError(
                    f"instance {i} has {name} {getattr(info, name)!r}, instance 0 {getattr(first, name)!r}: "
                    "the instances of a cluster serve one model"
                )
    layouts = ", ".join(f"{count} x {name}" for name, count in sorted(Counter(i.layout for i in infos).items()))
    sums = {name: sum(getattr(info, name) for info in infos) for name in _SUMMED}
    longest = min(info.max_model_len for info in infos)
    return msgspec.structs.replace(
        first, **sums, max_model_len=longest, layout=layouts, latency=None, utilisation=_merged_base(infos)
    )


def _merged_base(infos: Sequence[EngineInfo]) -> UtilisationBase | None:
    """Return the peaks of all instances together; None where one is not known."""
    bases = [info.utilisation for info in infos if info.utilisation is not None]
    if len(bases) < len(infos):
        return None
    return replace(
        bases[0],
        peak_flops=sum(base.peak_flops for base in bases),
        peak_bandwidth=sum(base.peak_bandwidth for base in bases),
    )


def merged_stats(all_stats: Sequence[EngineStats], waiting: int) -> EngineStats:
    """Merge the instances' stats: sums of all counts, and of the last iteration's figures the largest."""
    sums = {
        name: sum(getattr(stats, name) for stats in all_stats)
        for name in EngineStats.__struct_fields__
        if name not in (*_NEWEST, "stage_busy_s", "recovering")
    }
    sums["waiting"] += waiting
    newest: dict[str, Any] = {name: max((getattr(stats, name) for stats in all_stats), default=0) for name in _NEWEST}
    return EngineStats(**sums, **newest, recovering=any(stats.recovering for stats in all_stats))
