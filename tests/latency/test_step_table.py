"""Tables fitted to whole iterations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.perf.latency.table import StepSample, TableLatency, median_error, predicted_s, step_table

_CHUNKS, _PASTS = (1, 4, 16, 64, 256, 1024), (0, 500, 4000)


def _seconds(chunk: int, past: int, decodes: int, kv: int, row: float, pair: float, kv_s: float) -> float:
    """5 ms, `row` for each row, `pair` for each attended token of a causal chunk, `kv_s` for each KV token."""
    return 5e-3 + row * (chunk + decodes) + pair * (chunk * past + chunk * chunk / 2) + kv_s * kv


@given(st.floats(1e-6, 1e-3), st.floats(0, 2e-8), st.floats(0, 1e-6))
def test_steps_of_a_separable_engine_are_predicted_and_so_are_mixed_ones(row: float, pair: float, kv_s: float) -> None:
    shapes = [(chunk, past, 0, 0) for chunk in _CHUNKS for past in _PASTS]
    shapes += [(0, 0, n, n * past) for n in (1, 4, 16, 64) for past in (64, 1000)]
    samples = [StepSample(*shape, _seconds(*shape, row, pair, kv_s)) for shape in shapes]
    table = TableLatency(step_table(samples, "mark", "made up"))
    mixed = [(256, 500, 4, 900), (64, 4000, 16, 16000)]
    for sample in samples + [StepSample(*shape, _seconds(*shape, row, pair, kv_s)) for shape in mixed]:
        assert predicted_s(table, sample) == pytest.approx(sample.seconds, rel=0.02)


def test_one_disturbed_run_of_a_point_changes_nothing() -> None:
    steps = [StepSample(chunk, 0, 0, 0, 1e-3 * chunk) for chunk in _CHUNKS for _ in range(3)]
    disturbed = [*steps, StepSample(64, 0, 0, 0, 5.0)]
    assert step_table(disturbed, "mark", "") == step_table(steps, "mark", "")
    assert median_error(TableLatency(step_table(steps, "mark", "")), steps) < 1e-9


@pytest.mark.parametrize("disturbed", [64, 128, 192])
def test_a_disturbed_size_does_not_change_steps_beyond_the_largest(disturbed: int) -> None:
    """That of 192 made them an eighth: the table went on by the last two."""
    sizes = (64, 96, 128, 192, 256)
    samples = [StepSample(chunk, 0, 0, 0, 1e-3 * chunk * (1.4 if chunk == disturbed else 1.0)) for chunk in sizes]
    table = TableLatency(step_table(samples, "mark", ""))
    assert predicted_s(table, StepSample(2048, 0, 0, 0, 1.0)) == pytest.approx(2.048)


def test_histories_measured_are_noted_and_too_few_steps_are_refused() -> None:
    samples = [StepSample(chunk, past, 0, 0, 1e-3 * chunk) for chunk in _CHUNKS for past in _PASTS]
    assert step_table(samples, "mark", "").validated_past == _PASTS[-1]
    with pytest.raises(ConfigError, match="too few steps"):
        step_table(samples[:3], "mark", "")


def test_sizes_that_were_not_measured_over_histories_take_their_slope_from_those_that_were() -> None:
    samples = [StepSample(chunk, 0, 0, 0, _seconds(chunk, 0, 0, 0, 1e-4, 1e-8, 0.0)) for chunk in _CHUNKS]
    samples += [StepSample(64, past, 0, 0, _seconds(64, past, 0, 0, 1e-4, 1e-8, 0.0)) for past in (1000, 8000)]
    table = TableLatency(step_table(samples, "mark", ""))
    for chunk in (16, 256, 1024):
        wanted = _seconds(chunk, 4000, 0, 0, 1e-4, 1e-8, 0.0)
        assert predicted_s(table, StepSample(chunk, 4000, 0, 0, 1.0)) == pytest.approx(wanted, rel=0.02)
