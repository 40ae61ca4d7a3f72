"""Simulation of one request alone on KV groups, with the live scheduler on the simulator's clock.

The request enters one group; whenever its shard there is full another group joins
(`policy.iteration.groups`). Shards are equal: the request's tokens over the groups. Each point is a scenario
file; the modes differ in latencies as in `arithmetic`, which computes the same figures by Mnemosyne's Eqs. 9 and 10 for
comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from headway.sim import metrics
from headway.sim.build import instance_of, requests_of, run_of
from headway.sim.loop import simulate
from headway.sim.result import GroupJoin
from headway.sim.scenario import parse_scenario
from headway_research.base import Mode
from headway_research.medha.arithmetic import machine

PREFILL_CHUNK = 4096
TOKENS = 17
"""Output tokens of a request whose TBT is measured: 16 gaps."""


@dataclass(frozen=True)
class KvpServedResult:
    """Times of one request served alone; tuples are by batch of its prefill, in order."""

    ttft_s: float
    tbt_s: float | None
    """Median gap between its tokens; None: one token only."""
    began_s: tuple[float, ...]
    """Start of each prefill batch."""
    through_s: tuple[float, ...]
    """Seconds of each prefill batch from entering the first stage to leaving the last."""
    groups: tuple[int, ...]
    """Number of groups that took part in each prefill batch."""
    joins: tuple[GroupJoin, ...]

    def through_percentile_s(self, percent: float) -> float:
        """Return the percentile over prefill batches of the time that a decode batched with one waits for its token."""
        return float(np.percentile(self.through_s, percent))


def scenario(name: str, tp: int, stages: int, groups: int, prompt: int, chunk: int, output: int = 1) -> dict[str, Any]:
    """Return the set-up as scenario data for `headway simulate` (default mode's latencies)."""
    layout: dict[str, Any] = {"tp": tp, "stages": stages, "kvp": groups}
    # Equal shards: the last group joins when the others are full.
    if groups > 1:
        layout["shard_tokens"] = -(-prompt // groups)
    return {
        "name": f"{name}, {prompt:,} tokens, TP{tp} × {stages} stages × {groups} KV groups, chunks of {chunk}",
        "about": "latencies fitted to public H100 operator profiles; contexts beyond 12K tokens extrapolated",
        "cluster": {"accelerator": "h100"},
        "model": name,
        "layout": layout,
        "latency": {"source": "fitted"},
        "policy": {
            "policy": "fcfs", "chunking": f"static:{chunk}", "max_num_batched_tokens": chunk, "max_num_seqs": 8,
        },
        "workload": {
            "mix": [{"class": "long", "prompt": f"fixed:{prompt}", "output": f"fixed:{output}"}],
            "requests": 1, "arrivals": "at-once",
        },
    }  # fmt: skip


@cache
def served(
    name: str, tp: int, stages: int, groups: int, prompt: int, chunk: int, mode: Mode, output: int = 1
) -> KvpServedResult:
    """Simulate the request. Raises InfeasibleError where its KV does not fit memory."""
    setting = parse_scenario(scenario(name, tp, stages, groups, prompt, chunk, output))
    work = requests_of(setting.workload, None, 0)
    spec = replace(instance_of(setting, work), latency=machine(name, stages, mode, tp=tp).latency)
    result = simulate(spec, work, run_of(setting, 0, keep_iterations=True))
    (record,) = result.records
    # Iterations of the prefill; the others are decodes only.
    rows = [row for row in result.iterations if row.chunks]
    first_s = metrics.ttft_s(record)
    assert first_s is not None
    assert record.ok
    gaps = metrics.tbt_s(record)
    return KvpServedResult(
        ttft_s=first_s,
        tbt_s=float(np.median(gaps)) if output > 1 else None,
        began_s=tuple(row.stages[0][0] for row in rows),
        through_s=tuple(row.done_s - row.stages[0][0] for row in rows),
        groups=tuple(len(row.groups) for row in rows),
        joins=result.replicas[0].joins,
    )


def served_tbt_s(name: str, stages: int, context: int, groups: int, mode: Mode) -> float:
    """Return the TBT in seconds of one decode over `context` tokens on TP8, after a prefill in chunks of 4096."""
    found = served(name, 8, stages, groups, context, PREFILL_CHUNK, mode, TOKENS).tbt_s
    assert found is not None
    return found
