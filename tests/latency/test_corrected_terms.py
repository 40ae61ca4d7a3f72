"""Corrected models: what was not observed keeps the profile's shape; a worse correction is not used."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from headway.perf.latency.base import BatchLoad, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table import TableLatency, TableSource, TimeSpread

BASE = TableLatency(
    TableSource(
        fingerprint="",
        provenance="a test",
        tokens=((0, 0.001), (1, 0.001), (4096, 0.401)),
        chunks=((0, 0.0, 0.0), (64, 0.0001, 1e-6), (4096, 0.2, 6.4e-5)),
        decode=(0.0, 0.0, 0.0),
    )
)


def chunk(tokens: int, past: int = 0) -> BatchLoad:
    return replace(BatchLoad().with_chunk(tokens, BASE.attention_s(past, tokens), past), chunk_scale=1.0)


def seconds(model: CorrectedLatency, tokens: int, past: int) -> float:
    return load_s(model, BatchLoad().with_chunk(tokens, model.attention_s(past, tokens), past))


def test_long_prompts_keep_their_shape_where_only_short_ones_were_seen() -> None:
    model, rng = CorrectedLatency(BASE), random.Random(1)
    for _ in range(1000):
        load = chunk(rng.randrange(8, 64))
        model.observe(load, 1.5 * load_s(BASE, load) * rng.uniform(0.6, 1.4))
    profile_s = load_s(BASE, chunk(4096, 16384))
    assert seconds(model, 4096, 16384) == pytest.approx(1.5 * profile_s, rel=0.25)


def test_a_correction_that_misses_by_more_than_the_profile_is_not_used() -> None:
    model, rng = CorrectedLatency(BASE), random.Random(2)
    # One iteration in five is disturbed: the others take what the profile says.
    for _ in range(400):
        load = chunk(rng.choice((16, 256, 2048)))
        model.observe(load, load_s(BASE, load) * (rng.uniform(2.0, 3.0) if rng.random() < 0.2 else 1.0))
    assert model.rows_s(512) == BASE.rows_s(512)
    # A host that became slower is followed.
    for _ in range(400):
        load = chunk(rng.choice((16, 256, 2048)))
        model.observe(load, 1.6 * load_s(BASE, load))
    assert model.rows_s(2048) == pytest.approx(1.6 * BASE.rows_s(2048), rel=0.05)


def test_a_pause_lasts_as_long_in_a_long_iteration_as_in_a_short_one() -> None:
    short = TimeSpread.of(0.02, [1.0] * 95 + [10.0] * 5, typical_s=0.01)
    assert short.factor(0.5, 0.01) == short.factor(0.5, 1.0) == 1.0
    assert 0.01 * short.factor(1.0, 0.01) == pytest.approx(0.1)
    assert 1.0 * short.factor(1.0, 1.0) == pytest.approx(1.09)
    assert TimeSpread.of(0.02, [1.0] * 95 + [10.0] * 5).factor(1.0, 1.0) == 10.0
