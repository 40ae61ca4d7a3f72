"""The ladder where PecSched's rewriting of Azure keeps a cluster busy: most short requests are in time."""

from __future__ import annotations

import pytest

from headway_research.combined.comparison import CombinedPoint, run_point


@pytest.mark.long
def test_shorts_are_in_time_on_a_busy_cluster() -> None:
    found = run_point(CombinedPoint("azure", "busy", 0.0, "Ladder", 100.0, 0))
    assert found.short_in_time > 0.95
    assert found.short_p99 < 2.0
