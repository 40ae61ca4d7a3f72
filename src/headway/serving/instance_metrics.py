"""Metrics of each instance of a cluster, labelled with its number, role and node."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from headway.runtime.cluster.cluster_report import InstanceAdmin, InstanceReport

_LABELS = ("instance", "role", "node")
_PREFIX = "headway_instance_"
_GAUGES = {
    "requests_running": ("Requests that hold a place in its scheduler.", "running"),
    "requests_waiting": ("Requests that wait in its scheduler.", "waiting"),
    "requests_placed": ("Requests of which any part is or will be there.", "placed"),
    "queued_tokens": ("Prompt tokens that are placed there and not computed.", "queued_tokens"),
    "free_in_seconds": ("Predicted time until all that is placed there is prefilled.", "free_in_s"),
    "kv_tokens_used": ("Tokens that its KV pool holds.", "kv_tokens_used"),
    "kv_tokens_capacity": ("Tokens that its KV pool can hold.", "kv_tokens_total"),
}
_COUNTERS = {
    "prefill_tokens_computed": ("Prompt tokens computed, in batches and in spans.", "prefill_tokens_total"),
    "decode_tokens_computed": ("Output tokens computed.", "decode_tokens_total"),
    "restarts": ("Times that its process was lost and started again.", "restarts_total"),
}


class InstanceCollector:
    """Collector of the controller's instance reports, read at each scrape."""

    def __init__(self, cluster: InstanceAdmin) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """Yield one family per metric, with a sample per instance; called by the registry at each scrape."""
        # One report per scrape, so that all samples are of the same moment.
        instances = self._cluster.report().instances
        up = GaugeMetricFamily(f"{_PREFIX}up", "1 when the instance serves, 0 otherwise.", labels=_LABELS)
        for each in instances:
            up.add_metric(_labels(each), float(each.state in ("ready", "draining")))
        yield up
        for name, (text, field) in _GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for each in instances:
                gauge.add_metric(_labels(each), getattr(each, field))
            yield gauge
        for name, (text, field) in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=_LABELS)
            for each in instances:
                counter.add_metric(_labels(each), getattr(each, field))
            yield counter


def _labels(report: InstanceReport) -> tuple[str, str, str]:
    return str(report.id), report.role, str(report.node)
