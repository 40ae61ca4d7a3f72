"""A profile with a run's scales in it predicts what the model that learnt them does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table import DecodeTable, PastTable, TableLatency, TableSource, bake

MEASURED = TableSource(
    fingerprint="m|f|d|1 threads|tp1-pp1-kvp1",
    provenance="measured",
    tokens=((0, 0.001), (1, 0.002), (64, 0.004), (512, 0.02)),
    chunks=((0, 0.0, 0.0), (64, 1e-4, 2e-8), (512, 2e-3, 2e-7)),
    decode=(1e-4, 2e-5, 3e-9),
)
scale = st.floats(0.5, 4.0)


@given(st.tuples(scale, scale, scale, scale), st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 100_000))
def test_baked_table_equals_the_corrected_model(scales: tuple[float, ...], rows: int, chunk: int, past: int) -> None:
    learnt = CorrectedLatency(TableLatency(MEASURED))
    learnt.scales[:] = scales
    learnt._k_fixed, learnt._k_rows, learnt._k_decode, learnt._k_chunk = scales
    baked = TableLatency(bake(MEASURED, scales, "served"))
    if scales[0] * 0.002 >= scales[1] * 0.001:  # else what is fixed would be less than nothing, and is cut to nothing
        assert baked.token_s(rows, rows)[0] == pytest.approx(learnt.token_s(rows, rows)[0])
    assert baked.chunk_s(past, chunk, chunk)[0] == pytest.approx(learnt.chunk_s(past, chunk, chunk)[0])
    assert baked.decode_s(rows, past) == pytest.approx(learnt.decode_s(rows, past))


def test_grids_and_long_histories_are_scaled_as_well() -> None:
    source = TableSource(
        fingerprint="f",
        provenance="fitted",
        tokens=MEASURED.tokens,
        chunks=MEASURED.chunks,
        decode=MEASURED.decode,
        decode_grid=DecodeTable((1, 8), (128, 1024), ((1e-4, 4e-4), (5e-4, 9e-4)), 1e-8),
        past=PastTable(4096, ((64, 1e-4, 3e-8), (512, 1e-3, 4e-7))),
    )
    plain, baked = TableLatency(source), TableLatency(bake(source, (1.0, 1.0, 2.0, 3.0), "served"))
    assert baked.decode_s(4, 100_000) == pytest.approx(2.0 * plain.decode_s(4, 100_000))
    for past in (0, 2000, 50_000):
        assert baked.chunk_s(past, 300, 300)[0] == pytest.approx(3.0 * plain.chunk_s(past, 300, 300)[0])
    assert baked.token_s(77, 77)[0] == pytest.approx(plain.token_s(77, 77)[0])
    assert baked.source.provenance == "fitted; served"
