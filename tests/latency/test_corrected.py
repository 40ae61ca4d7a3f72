"""The model that corrects itself: it converges, stays within bounds, shrugs off outliers, and replays exactly. What was
not observed keeps the profile's shape, and a correction that is worse than the profile is not used."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from msgspec.structs import replace
from tests.helpers.latency_models import gpu_roofline, table

from headway.perf.latency.base import BatchLoad, LatencyModel, decode_load, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table import TimeSpread

Shape = tuple[int, int, int]
"""(decodes, past, chunk)."""
Scales = tuple[float, float, float]


def random_shape(rng: random.Random) -> Shape:
    return rng.choice((0, 4, 16, 64)), rng.choice((0, 4_000, 60_000)), rng.choice((0, 1, 64, 512, 1024))


def load_of(model: LatencyModel, shape: Shape) -> BatchLoad:
    decodes, past, chunk = shape
    load = BatchLoad(decodes, decodes, decodes * 3_000)
    return load.with_chunk(chunk, model.attention_s(past, chunk)) if chunk or not decodes else load


def true_s(base: LatencyModel, shape: Shape, scales: tuple[float, float, float]) -> float:
    load = load_of(base, shape)
    rows = float(base.token_s(load.tokens, load.tokens)[0])
    decode = base.decode_s(load.decodes, load.decode_kv) if load.decodes else 0.0
    return scales[0] * rows + scales[1] * decode + scales[2] * load.chunk_s


def teach(model: CorrectedLatency, scales: Scales, steps: int, seed: int, spikes: float = 0.0) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        shape = random_shape(rng)
        seconds = true_s(model.base, shape, scales) * rng.lognormvariate(0.0, 0.08)
        seconds *= 50.0 if rng.random() < spikes else 1.0
        model.observe(load_of(model, shape), seconds)
        assert np.all((model.scales >= 0.05) & (model.scales <= 20.0))


def errors(model: CorrectedLatency, scales: tuple[float, float, float]) -> list[float]:
    """Relative errors over what a server's iterations look like, ascending."""
    shapes = [(d, p, c) for d in (0, 4, 16, 64) for p in (0, 4_000, 60_000) for c in (0, 64, 512, 1024) if d or c]
    return sorted(abs(load_s(model, load_of(model, s)) / true_s(model.base, s, scales) - 1.0) for s in shapes)


def mean_error(model: CorrectedLatency, scales: tuple[float, float, float]) -> float:
    found = errors(model, scales)
    return sum(found) / len(found)


@pytest.mark.parametrize("scales", [(2.0, 2.0, 2.0), (0.6, 0.6, 0.6), (1.5, 3.0, 0.7), (0.8, 0.5, 2.5)])
@pytest.mark.parametrize("seed", range(3))
def test_mean_error_is_below_5_percent_after_200_noisy_observations_and_worst_below_6_after_400(
    scales: Scales, seed: int
) -> None:
    model = CorrectedLatency(gpu_roofline())
    assert mean_error(model, scales) > 0.15
    teach(model, scales, 200, seed)
    assert mean_error(model, scales) < 0.05
    teach(model, scales, 200, seed + 100)
    assert errors(model, scales)[-1] < 0.06


def test_one_in_fifty_iterations_that_take_50_times_as_long_cost_less_than_15_percent() -> None:
    model = CorrectedLatency(gpu_roofline())
    teach(model, (1.3, 1.3, 1.3), 600, seed=1, spikes=0.02)
    assert mean_error(model, (1.3, 1.3, 1.3)) < 0.15


def test_a_single_outlier_after_learning_hardly_moves_it() -> None:
    model = CorrectedLatency(gpu_roofline())
    teach(model, (1.0, 1.0, 1.0), 200, seed=2)
    load = load_of(model, (16, 4_000, 512))
    before = load_s(model, load)
    model.observe(load, 50 * before)
    assert load_s(model, load_of(model, (16, 4_000, 512))) < 1.1 * before


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_scales_stay_within_bounds_whatever_is_measured(factor: float) -> None:
    model = CorrectedLatency(gpu_roofline())
    rng = random.Random(0)
    for _ in range(500):
        shape = random_shape(rng)
        model.observe(load_of(model, shape), factor * true_s(model.base, shape, (1, 1, 1)))
    assert np.all(np.isfinite(model.scales))
    assert np.all((model.scales >= 0.05) & (model.scales <= 20.0))
    edge = 0.05 if factor < 1 else 20.0
    assert model.scales[0] == pytest.approx(edge, rel=0.2)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_invalid_measurements_are_ignored(seconds: float) -> None:
    model = CorrectedLatency(gpu_roofline())
    model.observe(BatchLoad(64, 64, 10_000), seconds)
    assert model.scales.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_scales_follow_a_host_that_slows_down() -> None:
    model = CorrectedLatency(gpu_roofline())
    teach(model, (1.0, 1.0, 1.0), 1000, seed=3)
    teach(model, (1.8, 1.8, 1.8), 600, seed=4)
    assert mean_error(model, (1.8, 1.8, 1.8)) < 0.1


def test_scales_of_terms_that_are_not_observed_do_not_drift() -> None:
    """Thousands of decodes only, at one size: the scale of chunks stays where it was, and nothing blows up."""
    model = CorrectedLatency(gpu_roofline())
    teach(model, (1.5, 1.5, 1.5), 200, seed=5)
    rng = random.Random(6)
    for _ in range(4_000):
        load = load_of(model, (16, 0, 0))
        model.observe(load, 1.5 * load_s(model.base, load_of(model.base, (16, 0, 0))) * rng.lognormvariate(0, 0.05))
    assert mean_error(model, (1.5, 1.5, 1.5)) < 0.1


def test_the_same_observations_give_the_same_scales_bit_for_bit() -> None:
    one, two = CorrectedLatency(gpu_roofline()), CorrectedLatency(gpu_roofline())
    teach(one, (1.2, 0.9, 3.0), 300, seed=7, spikes=0.01)
    teach(two, (1.2, 0.9, 3.0), 300, seed=7, spikes=0.01)
    assert one.scales.tobytes() == two.scales.tobytes()


def test_scales_change_more_slowly_at_first_with_higher_confidence() -> None:
    def moved(confidence: float) -> float:
        model = CorrectedLatency(gpu_roofline(), confidence)
        load = load_of(model, (0, 0, 512))
        model.observe(load, 2 * load_s(model, load))
        return load_s(model, load_of(model, (0, 0, 512))) / load_s(model.base, load) - 1.0

    assert 0.0 < moved(50.0) < moved(1.0) / 5


def test_with_batches_in_flight_the_scale_at_scheduling_counts() -> None:
    """Batches that were sized before the model learned, and are observed after: exactly as if the loads had been
    stated in the base's seconds."""

    def batch(model: CorrectedLatency, past: int) -> BatchLoad:
        load = decode_load(model, 8, 24_000)
        return load.with_chunk(512, model.attention_s(past, 512), past)

    staged, told = CorrectedLatency(gpu_roofline()), CorrectedLatency(gpu_roofline())
    pasts = [4_000 * (1 + i % 7) for i in range(60)]
    flying = [batch(staged, pasts[0]), batch(staged, pasts[1])]
    for past, following in zip(pasts, pasts[2:], strict=False):
        base = BatchLoad(8, 8, 24_000, chunk_scale=1.0).with_chunk(512, staged.base.attention_s(past, 512), past)
        seconds = 2.0 * load_s(staged.base, base)
        flying.append(batch(staged, following))
        staged.observe(flying.pop(0), seconds)
        told.observe(base, seconds)
        np.testing.assert_allclose(staged.scales, told.scales, rtol=1e-9)
    assert staged.chunk_scale > 1.2


@pytest.mark.parametrize("speed", [1 / 60, 1 / 10, 1.0, 10.0, 60.0])
def test_a_rough_model_that_is_wrong_about_the_machine_s_speed_is_right_after_a_chat_and_a_prompt(speed: float) -> None:
    """Before, a roofline from rates that were measured while other servers started was off by hundreds of percent for
    hundreds of iterations: each scale was learned alone, and the last one stayed at its bound."""
    model, truth = CorrectedLatency(gpu_roofline(), confidence=0.3), (speed, speed, 0.6 * speed)
    rng = random.Random(7)
    chat: list[Shape] = [(0, 0, 200), *[(1, 0, 0)] * 15]
    prompt: list[Shape] = [(rng.choice((0, 1, 2)), 512 * i, 512) for i in range(60)]
    found = []
    for shape in [*chat, *prompt]:
        seconds = true_s(model.base, shape, truth) * rng.lognormvariate(0.0, 0.05)
        found.append(abs(load_s(model, load_of(model, shape)) / seconds - 1.0))
        model.observe(load_of(model, shape), seconds)
    assert max(found[36:]) < 1.0
    assert sum(found[46:]) / 30 < 0.12


def test_a_model_that_was_measured_is_not_rescaled_by_a_first_iteration_that_takes_long() -> None:
    model = CorrectedLatency(gpu_roofline(), confidence=2.0)
    load = load_of(model, (0, 0, 512))
    model.observe(load, 60.0 * load_s(model, load))
    assert np.all(model.scales <= 3.0)


def test_speculative_rows_beside_no_prompt_say_nothing_of_the_speed() -> None:
    """In a roofline a few rows take no longer than one: there is no work to compare."""
    model = CorrectedLatency(gpu_roofline(), confidence=0.3)
    model.observe(BatchLoad(8, 2, 400), 60.0 * load_s(model, BatchLoad(8, 2, 400)))
    assert np.all(model.scales <= 3.5)


@pytest.mark.parametrize("exception", [0, 1, 2])
def test_a_rough_model_gets_over_an_early_iteration_that_takes_a_hundred_times_as_long(exception: int) -> None:
    model, base = CorrectedLatency(gpu_roofline(), confidence=0.3), gpu_roofline()
    for i in range(12):
        load = load_of(base, (0, 512 * i, 512))
        model.observe(load_of(model, (0, 512 * i, 512)), load_s(base, load) * (100.0 if i == exception else 1.0))
    load = load_of(base, (0, 8192, 512))
    assert load_s(model, load_of(model, (0, 8192, 512))) == pytest.approx(load_s(base, load), rel=0.2)


# -- what was measured ----------------------------------------------------------------------------------------------

MEASURED = table(
    [(0, 0.001), (1, 0.001), (4096, 0.401)], [(0, 0.0, 0.0), (64, 0.0001, 1e-6), (4096, 0.2, 6.4e-5)], (0.0, 0.0, 0.0)
)


def chunk(tokens: int, past: int = 0) -> BatchLoad:
    return replace(BatchLoad().with_chunk(tokens, MEASURED.attention_s(past, tokens), past), chunk_scale=1.0)


def seconds(model: CorrectedLatency, tokens: int, past: int) -> float:
    return load_s(model, BatchLoad().with_chunk(tokens, model.attention_s(past, tokens), past))


def test_long_prompts_keep_their_shape_where_only_short_ones_were_seen() -> None:
    model, rng = CorrectedLatency(MEASURED), random.Random(1)
    for _ in range(1000):
        load = chunk(rng.randrange(8, 64))
        model.observe(load, 1.5 * load_s(MEASURED, load) * rng.uniform(0.6, 1.4))
    profile_s = load_s(MEASURED, chunk(4096, 16384))
    assert seconds(model, 4096, 16384) == pytest.approx(1.5 * profile_s, rel=0.25)


def test_a_correction_that_misses_by_more_than_the_profile_is_not_used() -> None:
    model, rng = CorrectedLatency(MEASURED), random.Random(2)
    # One iteration in five is disturbed: the others take what the profile says.
    for _ in range(400):
        load = chunk(rng.choice((16, 256, 2048)))
        model.observe(load, load_s(MEASURED, load) * (rng.uniform(2.0, 3.0) if rng.random() < 0.2 else 1.0))
    assert model.rows_s(512) == MEASURED.rows_s(512)
    # A host that became slower is followed.
    for _ in range(400):
        load = chunk(rng.choice((16, 256, 2048)))
        model.observe(load, 1.6 * load_s(MEASURED, load))
    assert model.rows_s(2048) == pytest.approx(1.6 * MEASURED.rows_s(2048), rel=0.05)


def test_a_pause_lasts_as_long_in_a_long_iteration_as_in_a_short_one() -> None:
    short = TimeSpread.of(0.02, [1.0] * 95 + [10.0] * 5, typical_s=0.01)
    assert short.factor(0.5, 0.01) == short.factor(0.5, 1.0) == 1.0
    assert 0.01 * short.factor(1.0, 0.01) == pytest.approx(0.1)
    assert 1.0 * short.factor(1.0, 1.0) == pytest.approx(1.09)
    assert TimeSpread.of(0.02, [1.0] * 95 + [10.0] * 5).factor(1.0, 1.0) == 10.0
