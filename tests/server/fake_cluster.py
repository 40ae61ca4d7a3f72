"""A cluster of two instances for tests of its endpoints, over the fake engine."""

from __future__ import annotations

from typing import Any

from tests.helpers.fake_engine import FakeEngine

from headway.core.errors import RequestError
from headway.policy.placement.contract import RateTable
from headway.runtime.cluster.instances import ClusterReport, InstanceReport


def instance(number: int, **fields: Any) -> InstanceReport:
    known = {
        "id": number, "role": "prefill", "node": 1, "pool": 0, "state": "ready", "incarnation": 0, "pid": 4,
        "placed": 2, "running": 1, "waiting": 0, "queued_tokens": 77, "free_in_s": 0.5, "kv_tokens_used": 10,
        "kv_tokens_total": 100, "prefill_tokens_total": 5, "decode_tokens_total": 6, "restarts_total": 3,
    }  # fmt: skip
    return InstanceReport(**{**known, **fields})


class FakeClusterEngine(FakeEngine):
    """Two instances, of which one has failed."""

    left: int | None = None
    rates: RateTable | None = None

    def report(self) -> ClusterReport:
        both = [instance(0), instance(1, role="decode", state="failed", failure="no memory")]
        return ClusterReport(placement="tetris", state="ready", requests=3, waiting=1, transfers=2, instances=both)

    def join(self, pool: int) -> InstanceReport:
        if pool:
            raise RequestError("pool must be between 0 and 0", "pool")
        return instance(2, state="starting")

    def replace_rates(self, table: RateTable) -> None:
        self.rates = table

    def leave(self, number: int) -> InstanceReport:
        self.left = number
        return instance(number, state="draining")
