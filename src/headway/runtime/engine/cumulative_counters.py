"""Counters that never fall, across restarts of the engine that counts."""

from __future__ import annotations

import msgspec

from headway.runtime.engine.protocol import EngineStats

_COUNTERS = tuple(
    name for name in EngineStats.__struct_fields__ if name.endswith("_total") and name != "kv_tokens_total"
)
_NOTHING = EngineStats()


def accumulate_counters(before: EngineStats, now: EngineStats) -> EngineStats:
    """Return `now` with the counters of `before` added. Gauges are those of `now`."""
    # The common case, without a restart: no copy for each message.
    if before == _NOTHING:
        return now
    totals = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    busy = {(group, stage): seconds for group, stage, seconds in before.stage_busy_s}
    for group, stage, seconds in now.stage_busy_s:
        busy[group, stage] = busy.get((group, stage), 0.0) + seconds
    stages = tuple((*key, seconds) for key, seconds in sorted(busy.items()))
    return msgspec.structs.replace(now, **totals, stage_busy_s=stages)
