"""Error bars of predictions: nearest the data narrow, beyond it wide and named."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.perf.hardware import ParallelLayout, model
from headway.perf.latency.base import BatchLoad, LatencyModel, decode_load, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.device_fit import DERIVED_BANDS
from headway.perf.latency.fitted import (
    BEYOND_BANDS,
    ErrorBand,
    beyond_share,
    error_band,
    fitted,
    left_out_share,
    prefill_band,
    table_source,
)
from headway.perf.latency.table import MachineRates, roofline

H100 = fitted("h100", "llama-3-8b", ParallelLayout(tp=8))


def band_of(model: LatencyModel, load: BatchLoad | int) -> ErrorBand:
    """Of an iteration, or of a prompt of so many tokens."""
    band = prefill_band(model, load) if isinstance(load, int) else error_band(model, load)
    assert band is not None
    return band


def test_a_band_holds_the_prediction_of_the_model() -> None:
    load = decode_load(H100, 64, 64 * 8000).with_chunk(512, H100.attention_s(4000, 512), 4000)
    band = band_of(H100, load)
    assert band.seconds == pytest.approx(load_s(H100, load))
    assert 0.0 < band.seconds < band.high_s
    assert band.extrapolated == ()
    assert not band.derived


def test_histories_beyond_the_profiles_are_named_and_widen_the_band() -> None:
    near, far, farther = (band_of(H100, n) for n in (12_000, 131_072, 1_000_000))
    assert near.extrapolated == ()
    assert far.extrapolated == farther.extrapolated == ("history",)
    assert near.share < far.share < farther.share
    assert "extrapolated (history)" in farther.words()


def test_a_long_decode_and_a_large_batch_are_named() -> None:
    decode = band_of(H100, decode_load(H100, 1, 1_000_000))
    rows = band_of(H100, BatchLoad(tokens=30_000))
    assert decode.extrapolated == ("decode history",)
    assert rows.extrapolated == ("rows",)


def test_more_decodes_than_were_measured_are_named_and_widen_the_band() -> None:
    # Measured up to 32,768 rows, so that only the decodes lie outside.
    a100 = fitted("a100", "llama-3-8b", ParallelLayout(tp=8))
    most = a100.source.details["validated"]["decode_batch"]
    near, far, farther = (band_of(a100, decode_load(a100, n, n * 512)) for n in (most, 2 * most, 4 * most))
    assert near.extrapolated == ()
    assert far.extrapolated == farther.extrapolated == ("decode batch",)
    assert near.share < far.share < farther.share


def test_all_reduces_by_data_sheet_widen_the_band_by_their_part_of_the_time() -> None:
    rows = BatchLoad(tokens=2048)
    measured = band_of(H100, rows)
    sheet = fitted("h100", "llama-3-8b", ParallelLayout(tp=8, inside="pcie5"))
    derived = band_of(sheet, rows)
    assert sheet.source.details["families"]["collectives"].startswith("derived")
    assert 0.0 < H100.source.details["collective_share"] < sheet.source.details["collective_share"] < 1.0
    assert measured.share < derived.share <= DERIVED_BANDS["collectives"]


def test_a_device_without_profiles_has_a_wider_band_and_says_derived() -> None:
    own, other = band_of(H100, 8192), band_of(fitted("h20-96gb", "llama-3-8b"), 8192)
    assert other.derived
    assert other.words().endswith("derived")
    assert other.share > own.share


def test_a_corrected_model_has_the_band_of_its_table_and_one_without_a_table_has_none() -> None:
    assert table_source(CorrectedLatency(H100)) is H100.source
    assert table_source(object()) is None


def test_a_roofline_counts_as_derived_from_data_sheets() -> None:
    band = band_of(
        roofline(model("llama-3-8b"), MachineRates(linear_flops=4e14, attention_flops=3e14, bandwidth=3e12)), 2048
    )
    assert band.derived
    assert band.share >= 0.26


@given(name=st.sampled_from(sorted(BEYOND_BANDS)), sizes=st.lists(st.integers(1, 10**8), min_size=2, max_size=2))
def test_farther_from_the_data_never_means_a_narrower_band(name: str, sizes: list[int]) -> None:
    low, high = sorted(sizes)
    assert 0.0 <= beyond_share(name, low, 4096) <= beyond_share(name, high, 4096)
    assert beyond_share(name, min(low, 4096), 4096) == 0.0


def test_knots_on_a_line_leave_no_error_and_a_jump_does() -> None:
    line = [(float(x), 2.0 * x + 1) for x in (1, 2, 4, 8, 16)]
    assert left_out_share(line) == pytest.approx(0.0, abs=1e-12)
    assert left_out_share([*line[:2], (4.0, 18.0), *line[3:]]) > 0.2
    assert left_out_share(line[:2]) == 0.0


def test_a_share_of_one_or_more_has_no_upper_end() -> None:
    assert ErrorBand(1.0, 1.2).high_s == inf
    assert np.isclose(ErrorBand(1.0, 0.25).high_s, 4 / 3)
    assert ErrorBand(1.0, 0.994).words() == "± 99%"
    assert ErrorBand(1.0, 1.15, ("history",)).words() == "at least 1/2.1 of it, no upper bound, extrapolated (history)"
