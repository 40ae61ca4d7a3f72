from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.sim.workload.generate import (
    PRESETS,
    ConstantArrivals,
    FixedLengths,
    GammaArrivals,
    LogNormalLengths,
    MixtureLengths,
    PoissonArrivals,
    QuantileLengths,
    UniformLengths,
    arrivals,
    parse_lengths,
    parse_tokens,
    preset,
)

N = 20_000


@given(st.integers(0, 2**32 - 1), st.integers(1, 10**6), st.integers(0, 10**6), st.floats(0.1, 3))
def test_samples_are_whole_positive_bounded_and_repeatable(seed: int, low: int, width: int, sigma: float) -> None:
    for law in (
        FixedLengths(low),
        UniformLengths(low, low + width),
        LogNormalLengths(np.log(low + width / 2), sigma, low, low + width),
    ):
        one = law.sample(np.random.default_rng(seed), 20)
        assert one.dtype == np.int64
        assert low <= one.min() <= one.max() <= low + width
        assert (one == law.sample(np.random.default_rng(seed), 20)).all()


def test_a_lognormal_has_its_quantiles(rng: np.random.Generator) -> None:
    drawn = LogNormalLengths.of(1000, 4000).sample(rng, N)
    assert np.median(drawn) == pytest.approx(1000, rel=0.03)
    assert np.percentile(drawn, 90) == pytest.approx(4000, rel=0.05)


def test_truncation_does_not_pile_samples_up_at_the_ends(rng: np.random.Generator) -> None:
    drawn = LogNormalLengths.of(1000, 4000, 500, 2000).sample(rng, N)
    assert 500 <= drawn.min() <= drawn.max() <= 2000
    assert (drawn == 2000).mean() < 0.005


def test_draws_follow_their_quantiles_and_mixtures(rng: np.random.Generator) -> None:
    drawn = QuantileLengths(((0.0, 10), (0.5, 100), (1.0, 1000))).sample(rng, N)
    assert np.median(drawn) == pytest.approx(100, rel=0.03)
    mixed = MixtureLengths(((3.0, FixedLengths(1)), (1.0, FixedLengths(9)))).sample(rng, N)
    assert (mixed == 9).mean() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("process", "cv"),
    [(PoissonArrivals(5), 1), (GammaArrivals(5, 3), 3), (GammaArrivals(5, 0.5), 0.5), (ConstantArrivals(5), 0)],
)
def test_arrivals_have_their_rate_and_burstiness(process: PoissonArrivals, cv: float, rng: np.random.Generator) -> None:
    times = process.times(rng, N)
    gaps = np.diff(times)
    assert times[0] == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-6)
    assert process.times(rng, 0).size == 0


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("fixed:200", 200, 200),
        ("1k", 1000, 1000),
        ("1K", 1024, 1024),
        ("uniform:100-500", 100, 500),
        ("uniform:100k-1m", 100_000, 1_000_000),
        ("lognormal:median=1000,p90=4000,min=10,max=1e4", 10, 10_000),
        ("lognormal:mu=6.9,sigma=1.1", 1, 10**9),
        ("mix:0.95*lognormal:median=300,p90=1200,max=5000+0.05*uniform:100k-500k", 1, 500_000),
    ],
)
def test_length_specs_are_parsed(text: str, low: int, high: int, rng: np.random.Generator) -> None:
    drawn = parse_lengths(text).sample(rng, 500)
    assert low <= drawn.min() <= drawn.max() <= high


def test_empirical_lengths_take_the_requested_column(tmp_path: Path, rng: np.random.Generator) -> None:
    file = tmp_path / "t.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n5,50\n6,60\n")
    assert set(parse_lengths(f"empirical:{file}").sample(rng, 50)) == {5, 6}
    assert set(parse_lengths(f"empirical:{file}", "output").sample(rng, 50)) == {50, 60}


@pytest.mark.parametrize(
    "text",
    ["", "x", "zipf:2", "uniform:5", "uniform:9-3", "fixed:0", "fixed:1.5", "fixed:nan", "lognormal:median=5",
     "lognormal:a=1", "lognormal:median=10,p90=5",
     "lognormal:median=10,p90=20,min=50,max=5", "lognormal:mu=3,sigma=0,min=100,max=200",
     "mix:fixed:3", "mix:0*fixed:3", "empirical:/none"],
)  # fmt: skip
def test_bad_length_specs_are_errors_with_the_reason(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lengths(text)
    assert str(caught.value)


def test_token_counts_are_parsed() -> None:
    assert [parse_tokens(text) for text in ("7", "32k", "32K", "1.5m")] == [7, 32_000, 32_768, 1_500_000]


@pytest.mark.parametrize(
    ("kind", "rate", "cv"), [("poisson", 0, 1), ("gamma", 1, 0), ("zipf", 1, 1), ("gamma", float("nan"), 1)]
)
def test_bad_arrivals_are_errors(kind: str, rate: float, cv: float) -> None:
    with pytest.raises(ConfigError):
        arrivals(kind, rate, cv)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_draw_the_same_requests_from_the_same_seed(name: str) -> None:
    drawn = preset(name).draw(np.random.default_rng(3), PoissonArrivals(1.0), 4000)
    again = preset(name).draw(np.random.default_rng(3), PoissonArrivals(1.0), 4000)
    assert drawn == again
    assert all(r.prompt_tokens >= 1 and r.output_tokens >= 1 for r in drawn)


def test_preset_figures_match_the_published_ones() -> None:
    def prompts(name: str, klass: str | None = None) -> np.ndarray:
        drawn = PRESETS[name].draw(np.random.default_rng(1), PoissonArrivals(1.0), N)
        return np.array([r.prompt_tokens for r in drawn if klass in (None, r.klass)])

    assert np.percentile(prompts("medha-swe"), [50, 90]) == pytest.approx([393_000, 839_000], rel=0.03)
    assert prompts("tetris-short").mean() == pytest.approx(23_600, rel=0.02)
    assert prompts("tetris-medium").mean() == pytest.approx(32_800, rel=0.02)
    assert prompts("tetris-long").mean() == pytest.approx(50_100, rel=0.02)
    assert prompts("medha-mix", "long").size / N == pytest.approx(0.05, abs=0.01)
    assert prompts("pecsched-mix", "short").max() <= 4083
    with pytest.raises(ConfigError, match="medha-mix"):
        preset("nothing")
