"""Latency models as plain data in event logs, so that a replay starts from the run's own predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headway.core.errors import ConfigError
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table_latency import TableLatency, TableSource


def describe(model: LatencyModel) -> dict[str, Any] | None:
    """Return a table model, corrected or not, as plain data; None for other models.

    Call it before the first `observe`: learned scales are not recorded, a replay learns them again."""
    base = model.base if isinstance(model, CorrectedLatency) else model
    if not isinstance(base, TableLatency):
        return None
    confidence = model.confidence if isinstance(model, CorrectedLatency) else None
    return {"table": msgspec.to_builtins(base.source), "confidence": confidence}


def restore(data: Mapping[str, Any] | None) -> tuple[TableLatency, LatencyModel]:
    """Return (the table, the model as it was at the start). Raises ConfigError when the log does not contain one."""
    if data is None:
        raise ConfigError("the log does not say which latency model the engine used, so it cannot be replayed")
    try:
        table = TableLatency(msgspec.convert(data["table"], TableSource))
        confidence = data["confidence"]
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(f"the log's latency model cannot be read: {error}") from error
    # `confidence` is None where the run used the table without correction.
    return table, table if confidence is None else CorrectedLatency(table, confidence)
