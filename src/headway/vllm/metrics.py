"""Entry point of group `vllm.stat_logger_plugins`: what Headway's scheduler reports of itself, on vLLM's `/metrics`.

The scheduler runs in the engine's process and `/metrics` in the server's: once a second, and when the last request has
ended, a small file in the temporary folder takes a snapshot across. Servers of several processes (`--api-server-count`)
or hosts have none.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from vllm.v1.metrics.loggers import StatLoggerBase

logger = logging.getLogger("vllm.headway")  # as in `scheduler`

_EVERY_S = 1.0
"""Seconds between two snapshots."""
_SECONDS = {
    "schedule": "Time spent on deciding what runs.",
    "busy": "Time spent in iterations.",
    "predicted": "Time that the latency model predicted for those iterations.",
}
_SLO = {
    "asked": "Requests that asked for a latency.",
    "met": "Requests that got all the latencies that they asked for.",
    "missed": "Requests that missed a latency that they asked for.",
}


def snapshot_path(vllm_config: Any, engine: int) -> Path:
    """Return the file of one engine's snapshots: one name in all processes of a server, another for each server."""
    return Path(tempfile.gettempdir()) / f"headway-{os.getuid()}-{vllm_config.instance_id}-{engine}.json"


class SnapshotFile:
    """The scheduler's end of the file."""

    def __init__(self, path: Path) -> None:
        # None: it cannot be written.
        self._path: Path | None = path
        self._written_s = float("-inf")

    def due(self, now: float) -> bool:
        """Return whether the last snapshot is old."""
        return self._path is not None and now - self._written_s >= _EVERY_S

    def write(self, now: float, snapshot: dict[str, Any]) -> None:
        """Replace the file. Where that fails, say so once and write none any more."""
        self._written_s = now
        if self._path is None:
            return
        scratch = self._path.with_suffix(".new")
        try:
            # Not through a link that another user of the folder has put there.
            scratch.unlink(missing_ok=True)
            with os.fdopen(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
                json.dump(snapshot, file)
            scratch.replace(self._path)
        except OSError as error:
            logger.warning("Headway: no metrics, since %s cannot be written (%s)", self._path, error.strerror)
            self._path = None

    def close(self) -> None:
        """Remove the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class HeadwayStatLogger(StatLoggerBase):
    """vLLM makes one for each engine. Reads the file when `/metrics` is asked, and takes nothing from vLLM's own."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        _COLLECTOR.paths[engine_index] = snapshot_path(vllm_config, engine_index)
        _COLLECTOR.model = model_name(vllm_config)
        _COLLECTOR.register()

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Called by vLLM for each step; nothing of it is needed."""

    def log_engine_initialized(self) -> None:
        """Called by vLLM once the engine is ready."""


class SnapshotCollector:
    """Prometheus collector over the snapshots of all engines."""

    def __init__(self) -> None:
        self.paths: dict[int, Path] = {}
        self.model = ""
        self._registered = False

    def register(self) -> None:
        """Add it to the registry of this process, once."""
        if not self._registered:
            self._registered = True
            REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of engines that have a snapshot; an engine without Headway's scheduler has none."""
        found = {}
        for engine, path in self.paths.items():
            try:
                found[str(engine)] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
        if found:
            yield from metrics(found, self.model)


def model_name(vllm_config: Any) -> str:
    """Return the name that vLLM serves the model by, the first of several."""
    served = vllm_config.model_config.served_model_name
    names = [served] if isinstance(served, str) else list(served or ())
    return str(names[0] if names else vllm_config.model_config.model)


def metrics(snapshots: dict[str, dict[str, Any]], model: str) -> Iterator[Metric]:
    """Yield Prometheus metrics of snapshots (`HostStats.snapshot`) by engine, named and labelled as in Headway's own
    server."""

    def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"headway_{name}", text, labels=["model_name", "engine", *labels])

    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"headway_{name}", text, labels=["model_name", "engine", *labels])

    seconds = {key: counter(f"{key}_seconds", text) for key, text in _SECONDS.items()}
    slo = {key: counter(f"slo_requests_{key}", text, "class") for key, text in _SLO.items()}
    targets = counter("slo_targets_missed", "Latencies asked for and missed: ttft, tpot.", "class", "target")
    iterations = counter("iterations", "Iterations of the engine.")
    errors = counter("policy_errors", "Steps in vLLM's own order, since the policy failed.")
    decisions = gauge("decision_seconds", "Time of a decision, of the last 1,024.", "quantile")
    error = gauge("prediction_error_ratio", "Mean relative error of predicted iteration times, of about the last 50.")
    learned = gauge("prefill_seconds", "Time of a prompt alone, as the latency model has learned it.", "tokens")
    for engine, one in snapshots.items():
        for tokens, value in one["prefill_s"]:
            learned.add_metric([model, engine, str(tokens)], value)
        iterations.add_metric([model, engine], one["iterations"])
        errors.add_metric([model, engine], one["policy_errors"])
        error.add_metric([model, engine], one["prediction_error"])
        for quantile, value in one["decision_s"].items():
            decisions.add_metric([model, engine, quantile], value)
        for key, value in one["seconds"].items():
            seconds[key].add_metric([model, engine], value)
        for what, kind, count in one["slo"]:
            if what in slo:
                slo[what].add_metric([model, engine, kind], count)
            else:
                targets.add_metric([model, engine, kind, what.removeprefix("missed_")], count)
    yield from (*seconds.values(), *slo.values(), targets, iterations, errors, decisions, error, learned)


_COLLECTOR = SnapshotCollector()
