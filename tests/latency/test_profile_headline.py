"""The headline of `headway profile`: rates and chunks that the latency table itself gives."""

from __future__ import annotations

import re

import pytest
from tests.helpers.latency_models import table

from headway.cli.profile import headline

# A row takes 10 us, and 1 ns more for each token before it.
LATENCY = table(
    [(0, 0.0), (1, 1e-5), (65536, 0.65536)], [(0, 0.0, 0.0), (1, 0.0, 1e-9), (8192, 0.0, 8192e-9)], (0.0, 0.0, 0.0)
)


def test_the_headline_has_rates_of_prompts_and_the_chunk_at_each_depth() -> None:
    rates, chunks = headline(LATENCY.source, 1 << 20)
    found = re.findall(r"([\d,]+) tokens/s for a prompt of ([\d,]+)", rates)
    assert [tokens for _, tokens in found] == ["2,048", "16,384"]
    # 100,000 rows a second without a history; attention takes some of it.
    short, long = (int(rate.replace(",", "")) for rate, _ in found)
    assert 40_000 < long < short <= 100_000
    aim_s = int(re.search(r"iterations of (\d+) ms", chunks)[1]) / 1e3  # type: ignore[index]
    sizes = [
        (int(size.replace(",", "")), int(depth.replace(",", "")))
        for size, depth in re.findall(r"([\d,]+) after ([\d,]+)", chunks)
    ]
    assert [depth for _, depth in sizes] == [0, 2048, 16384, 131072]
    for size, depth in sizes:
        assert LATENCY.rows_s(size) + size * depth * 1e-9 == pytest.approx(aim_s, rel=0.05)


def test_depths_beyond_the_kv_cache_are_left_out() -> None:
    rates, chunks = headline(LATENCY.source, 4096)
    assert "16,384" not in rates + chunks
    assert "2,048" in rates
    assert headline(LATENCY.source, 1024)[0].endswith("no prompt so long fits")
