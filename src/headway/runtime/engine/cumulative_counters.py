"""Counters that never fall, though the engine that counts is started again."""

from __future__ import annotations

import msgspec

from headway.runtime.engine.protocol import EngineStats

_COUNTERS = tuple(
    name for name in EngineStats.__struct_fields__ if name.endswith("_total") and name != "kv_tokens_total"
)
_NOTHING = EngineStats()


def accumulate_counters(before: EngineStats, now: EngineStats) -> EngineStats:
    """A snapshot of an engine, with all that earlier ones had counted. What is not counted, but is so at the time, is
    the newer one's."""
    if before == _NOTHING:
        return now
    totals = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    busy = {(group, stage): seconds for group, stage, seconds in before.stage_busy_s}
    for group, stage, seconds in now.stage_busy_s:
        busy[group, stage] = busy.get((group, stage), 0.0) + seconds
    stages = tuple((*key, seconds) for key, seconds in sorted(busy.items()))
    return msgspec.structs.replace(now, **totals, stage_busy_s=stages)
