"""MFU and MBU: what a batch counts, which peaks it is measured against, and the gauges of /metrics."""

from __future__ import annotations

import msgspec
import pytest
from tests.helpers.fake_engine import INFO, FakeEngine

from headway.core.batch import Batch, Chunk, DecodeGroup, GroupBatch, RemoteAttention
from headway.perf.hardware import ACCELERATORS, model, of_device
from headway.perf.utilisation import AttentionWork, utilisation_base
from headway.runtime.cluster.client import merged_info
from headway.runtime.engine.protocol import EngineStats
from headway.serving.metrics import UtilisationCollector

SHAPE = model("llama-3-8b")


def shares(collector: UtilisationCollector) -> tuple[float, float]:
    values = {family.name: family.samples[0].value for family in collector.collect()}
    return values["headway_mfu"], values["headway_mbu"]


def test_a_batch_counts_each_pair_of_query_and_key_once() -> None:
    decodes = DecodeGroup(("a", "b"), kv_sum=300)
    batch = Batch(id=1, parts=(GroupBatch(0, decodes, (Chunk("c", 10, 4, False),)),))
    # Tokens 10, 11, 12 and 13 attend 11, 12, 13 and 14 tokens.
    assert AttentionWork.of(batch) == AttentionWork(300 + 14, 300 + 11 + 12 + 13 + 14)


def test_a_chunk_cut_over_groups_counts_as_much_as_a_whole_one() -> None:
    whole = Batch(id=1, parts=(GroupBatch(0, DecodeGroup(), (Chunk("c", 10, 4, False),)),))
    first = GroupBatch(0, DecodeGroup(), assists=(RemoteAttention("c", 4, 1, 0, 8),))
    last = GroupBatch(1, DecodeGroup(), (Chunk("c", 10, 4, False, base=8),))
    assert AttentionWork.of(Batch(id=1, parts=(first, last))) == AttentionWork.of(whole)


def test_gauges_are_shares_of_the_peaks_over_the_last_ten_seconds() -> None:
    now = 100.0
    engine = FakeEngine(state="ready")
    collector = UtilisationCollector("headway_", engine, lambda: now)
    base = INFO.utilisation
    assert base is not None
    assert shares(collector) == (0.0, 0.0)
    # 10 s in which 1,000 tokens were prefilled by two forward passes.
    now = 110.0
    engine.stats = EngineStats(
        prefill_tokens_total=1000, passes_total=2, attention_pairs_total=500_500.0, kv_read_tokens_total=1000
    )
    flops = 2.0 * SHAPE.layers * SHAPE.layer_parameters * 1000 + 4.0 * SHAPE.layers * SHAPE.q_width * 500_500
    read = 2 * SHAPE.parameters * 2 + 1000 * SHAPE.kv_bytes_per_token
    expected = flops / 10 / base.peak_flops, read / 10 / base.peak_bandwidth
    assert shares(collector) == pytest.approx(expected)
    # Another scraper, just after: the same window, not an empty one.
    now = 110.5
    assert shares(collector) == pytest.approx((expected[0] * 10 / 10.5, expected[1] * 10 / 10.5))
    # Idle since.
    now = 130.0
    assert shares(collector) == (0.0, 0.0)


def test_peaks_are_a_data_sheet_s_for_known_accelerators_and_measured_for_others() -> None:
    asked = []

    def measure(kind: str, first: int, second: int, repeats: int) -> float:
        asked.append(kind)
        return 0.01

    h100 = utilisation_base(SHAPE, 2, "NVIDIA H100 80GB HBM3", measure)
    assert (h100.peak_flops, h100.peak_bandwidth) == (2 * 989.4e12, 2 * 3.35e12)
    assert h100.origin.startswith("NVIDIA H100 data sheet")
    assert asked == []
    cpu = utilisation_base(SHAPE, 2, None, measure)
    assert (cpu.peak_flops, cpu.peak_bandwidth) == (2 * 2.0 * 512**3 / 0.01, 2 * 64 * 2**20 / 0.01)
    assert cpu.origin == "measured at start-up"
    assert utilisation_base(SHAPE, 1, "NVIDIA GeForce RTX 4090", measure).origin == "measured at start-up"


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA L40S", "l40s-48gb"), ("NVIDIA H100 PCIe", None), ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA L4", None),
    ],
)  # fmt: skip
def test_a_driver_s_name_leads_to_the_data_sheet_of_that_form(name: str, known: str | None) -> None:
    assert of_device(name) == (None if known is None else ACCELERATORS[known])


def test_a_cluster_has_the_peaks_of_all_instances_or_none() -> None:
    merged = merged_info([INFO, INFO]).utilisation
    assert merged is not None
    assert INFO.utilisation is not None
    assert merged.peak_flops == 2 * INFO.utilisation.peak_flops
    assert merged_info([INFO, msgspec.structs.replace(INFO, utilisation=None)]).utilisation is None


def test_an_engine_whose_peaks_are_not_known_has_no_gauges() -> None:
    engine = FakeEngine(info_value=msgspec.structs.replace(INFO, utilisation=None), state="ready")
    assert list(UtilisationCollector("headway_", engine).collect()) == []
    assert list(UtilisationCollector("headway_", FakeEngine()).collect()) == []
