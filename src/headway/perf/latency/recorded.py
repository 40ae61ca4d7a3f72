"""A latency model as data, for logs: who replays a run starts from the predictions that it started from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headway.core.errors import ConfigError
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.tables import TableLatency, TableSource


def describe(model: LatencyModel) -> dict[str, Any] | None:
    """Plain data of a table, or of a table that corrects itself and has not begun to; None for other models."""
    base = model.base if isinstance(model, CorrectedLatency) else model
    if not isinstance(base, TableLatency):
        return None
    confidence = model.confidence if isinstance(model, CorrectedLatency) else None
    return {"table": msgspec.to_builtins(base.source), "confidence": confidence}


def restore(data: Mapping[str, Any] | None) -> tuple[TableLatency, LatencyModel]:
    """(the table, the model as it was at the start). ConfigError when the log does not say."""
    if data is None:
        raise ConfigError("the log does not say which latency model the engine used, so it cannot be replayed")
    try:
        table = TableLatency(msgspec.convert(data["table"], TableSource))
        confidence = data["confidence"]
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(f"the log's latency model cannot be read: {error}") from error
    return table, table if confidence is None else CorrectedLatency(table, confidence)
