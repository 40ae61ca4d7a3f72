"""Eq. (1): the fit of Table 1, its additivity, its inverse, and what cannot be fitted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.perf.latency import eq1
from headway.perf.latency.eq1 import Eq1Coefficients, PrefillSample
from headway.perf.latency.groups import GroupShape
from headway_research.tetris.examples import TableCells

TABLE = eq1.tetris_table1()
A_B_D = {  # notes: weighted fit, a s, b ms/1k, d µs/1k²
    1: (0.0301, 57.124, 1326.4),
    2: (0.0258, 30.868, 638.1),
    4: (0.0585, 15.920, 320.0),
    8: (0.1737, 6.901, 172.35),
    16: (0.3867, 2.525, 93.78),
}


def test_table_1_is_fitted_within_7_percent_by_known_coefficients() -> None:
    for sp, (a, b, d) in A_B_D.items():
        found = TABLE.sizes[sp]
        assert (found.a, found.b * 1024e3, found.d * 1024**2 * 1e6) == pytest.approx((a, b, d), rel=2e-3)
        assert found.c == 2 * found.d
    worst = max(worst for worst, _ in eq1.errors(TABLE, eq1.table1_samples()).values())
    assert 0.06 < worst < 0.065


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.sampled_from(sorted(A_B_D)), st.integers(1, 300_000), st.integers(1, 300_000))
def test_one_more_chunk_costs_one_more_constant_and_the_inverse_is_exact(sp: int, first: int, second: int) -> None:
    group, at = GroupShape(sp), TABLE.sizes[sp]
    whole = TABLE.prefill_s(0, first + second, group)
    parts = TABLE.prefill_s(0, first, group) + TABLE.prefill_s(first, second, group)
    # c = 2 d: attention over past tokens adds up exactly, so that only the constant is paid twice
    assert parts == pytest.approx(whole + at.a, rel=1e-9)
    budget_s = TABLE.prefill_s(first, second, group)
    assert TABLE.sizes[sp].solve(first, budget_s) == pytest.approx(second, rel=1e-6)
    assert TABLE.solve_tokens(first, at.a, group) == 0


def test_fit_recovers_the_coefficients_of_its_samples() -> None:
    truth = Eq1Coefficients(0.05, 2e-5, 3e-9, 1e-9)
    samples = [PrefillSample(4, p, n, truth.prefill_s(p, n)) for p in (0, 8192, 65536) for n in (1024, 16384, 131072)]
    found = eq1.fit(samples).sizes[4]
    assert (found.a, found.b, found.c, found.d) == pytest.approx((truth.a, truth.b, truth.c, truth.d), rel=1e-6)


def test_sizes_between_fitted_ones_lie_between_them() -> None:
    four, six, eight = (TABLE.prefill_s(0, 65_536, GroupShape(sp)) for sp in (4, 6, 8))
    assert four > six > eight
    budget = TABLE.prefill_s(1000, 5000, GroupShape(6))
    assert TABLE.solve_tokens(1000, budget, GroupShape(6)) in (4999, 5000)
    with pytest.raises(ConfigError, match="up to 16, not 32"):
        TABLE.prefill_s(0, 1000, GroupShape(32))


def test_bad_fits_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SP size 2 has too few different lengths"):
        eq1.fit([PrefillSample(2, 0, 1000, 0.1), PrefillSample(2, 0, 2000, 0.2)])
    with pytest.raises(ConfigError, match="not a measurement"):
        eq1.fit([PrefillSample(2, 0, 1000, 0.0)])
    bad = tmp_path / "fit.json"
    bad.write_text("{}")
    with pytest.raises(ConfigError, match="not a fit of Eq"):
        eq1.load(bad)


def test_table_cells_are_exact_and_times_rise_between_them() -> None:
    cells = TableCells(eq1.table1_samples())
    for sample in eq1.table1_samples():
        assert cells.prefill_s(0, sample.tokens, GroupShape(sample.sp)) == pytest.approx(sample.seconds, rel=1e-12)
    times = [cells.prefill_s(0, n, GroupShape(8)) for n in range(4096, 262_145, 4096)]
    assert times == sorted(times)
