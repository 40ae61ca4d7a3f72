"""Products beside zigzag-dse's mapper. Skipped where the extra `zigzag` is not installed."""

from __future__ import annotations

import pytest

pytest.importorskip("zigzag", reason="the extra `zigzag` is not installed")


@pytest.mark.filterwarnings("default")
def test_products_of_at_least_128_rows_agree_within_10_percent() -> None:
    """With zigzag's range for all; with its whole latency for all but two, whose operands it loads whole before it
    computes."""
    from headway.perf.accelerator.zigzag import TOLERANCE, crosscheck

    found = crosscheck()
    assert [(p.name, p.m, f"{p.difference:+.1%}") for p in found if not p.ok] == []
    apart = {(p.name, p.m) for p in found if abs(p.difference) > TOLERANCE}
    assert apart <= {("down", 640), ("out", 2048)}
