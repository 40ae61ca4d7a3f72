"""Products beside zigzag-dse's mapper. Skipped where the extra `zigzag` is not installed."""

from __future__ import annotations

import pytest

pytest.importorskip("zigzag", reason="the extra `zigzag` is not installed")


@pytest.mark.filterwarnings("default")
def test_products_of_at_least_128_rows_agree_within_10_percent() -> None:
    from headway.accelerator.zigzag import crosscheck

    assert [(p.name, p.m, f"{p.difference:+.1%}") for p in crosscheck() if not p.ok] == []
