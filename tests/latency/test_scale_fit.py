"""Scales that are fitted to a whole run."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.latency_models import table

from headway.perf.latency.base import BatchLoad
from headway.perf.latency.corrected import CorrectedLatency, LoadTerms, fit_scales, load_terms

TABLE = table([(0, 0.001), (1, 0.002), (512, 0.02)], [(0, 0.0, 0.0), (512, 2e-3, 2e-6)], (1e-4, 2e-5, 3e-8))


def run(rng: np.random.Generator, count: int) -> list[tuple[BatchLoad, LoadTerms]]:
    """Iterations of decodes, a third of them with a chunk."""
    loads = []
    for _ in range(count):
        decodes = int(rng.integers(1, 40))
        load = BatchLoad(decodes, decodes, decodes * int(rng.integers(10, 9000)))
        if rng.random() < 0.3:
            tokens, past = int(rng.integers(8, 512)), int(rng.integers(0, 16_000))
            load = load.with_chunk(tokens, TABLE.attention_s(past, tokens), past)
        loads.append(load)
    return [(load, load_terms(TABLE, load)) for load in loads]


def test_the_scales_of_a_noisy_run_come_back() -> None:
    rng = np.random.default_rng(3)
    true = np.array([1.5, 0.8, 2.0, 1.2])
    terms = [each for _, each in run(rng, 2000)]
    took = [float(np.dot(true, each)) * rng.gamma(25.0, 1 / 25.0) for each in terms]
    assert fit_scales(terms, took) == pytest.approx(true, rel=0.06)


def test_the_whole_run_counts_and_not_its_last_second() -> None:
    """A burst of other load ends a run: what was learned meanwhile is twice too long, the fit is not."""
    rng = np.random.default_rng(4)
    model, loads = CorrectedLatency(TABLE), run(rng, 2000)
    took = [sum(terms) * (2.0 if number >= 1700 else 1.0) for number, (_, terms) in enumerate(loads)]
    scales = fit_scales([terms for _, terms in loads], took)
    for (load, _), seconds in zip(loads, took, strict=True):
        model.observe(load, seconds)
    learned_s = sum(float(np.dot(model.scales, terms)) for _, terms in loads)
    fitted_s = sum(float(np.dot(scales, terms)) for _, terms in loads)
    assert learned_s > 1.3 * sum(took)
    assert fitted_s == pytest.approx(sum(took), rel=0.05)


def test_one_stall_does_not_move_a_term_and_a_term_that_never_occurs_stays() -> None:
    terms: list[LoadTerms] = [(0.002, 0.001, 0.001 * (1 + number % 5), 0.0) for number in range(100)]
    took = [sum(each) for each in terms]
    took[50] = 30.0
    scales = fit_scales(terms, took)
    assert scales[:3] == pytest.approx([1.0] * 3, abs=0.2)
    assert scales[3] == pytest.approx(1.0)
    assert sum(np.dot(scales, each) for each in terms) == pytest.approx(sum(map(sum, terms)), rel=0.05)
