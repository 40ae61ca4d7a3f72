"""The mapping search: bounds that no mapping can beat, what memory does to bytes, and what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.accelerator.accel_cases import study

from headway.core.errors import ConfigError
from headway_research.accelerator.machine import MACHINES, IterationWork, TechniqueSet, machine
from headway_research.accelerator.mapping import GemmShape, search
from headway_research.accelerator.operators import layers_of


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.sampled_from(sorted(MACHINES)), st.integers(1, 4096), st.integers(1, 16384), st.integers(1, 16384),
    st.booleans(), st.booleans(), st.sampled_from((0.5, 1.0, 2.0)), st.booleans(),
)  # fmt: skip
def test_a_mapping_needs_its_bytes_its_cycles_and_its_memory(
    name: str, m: int, n: int, k: int, in_chip: bool, out_chip: bool, weight: float, double: bool
) -> None:
    on = machine(name)
    gemm = GemmShape("x", m, n, k, n, weight, 2.0, in_chip and m * k < 1e6, out_chip and m * n < 1e6)
    (cost,) = search([gemm], on, double)
    least = n * k * weight + (0 if gemm.input_on_chip else 2 * m * k) + (0 if gemm.output_on_chip else 2 * m * n)
    assert cost.hbm_bytes >= least * (1 - 1e-12)
    assert cost.compute_s >= m * n * k / (on.macs * on.clock_hz)
    assert 0 < cost.peak_bytes <= on.compute_bytes
    assert 0 < cost.fill_bytes <= cost.hbm_bytes
    assert search([gemm, gemm._replace(m=m + 7)], on, double)[0] == cost  # products do not disturb each other


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 4096), st.integers(64, 16384), st.integers(64, 16384), st.sampled_from((1.5, 4.0)))
def test_more_operand_memory_moves_no_more_bytes(m: int, n: int, k: int, times: float) -> None:
    small = machine("a100")
    gemm = GemmShape("x", m, n, k, n, 2.0, 2.0)
    large = small.with_(compute_bytes=int(small.compute_bytes * times))
    assert search([gemm], large)[0].hbm_bytes <= search([gemm], small)[0].hbm_bytes


def test_llamas_products_fill_the_tpu_like_arrays_when_there_are_rows_enough() -> None:
    on = machine("tpuv6e")
    (cost,) = search([GemmShape("up", 2048, 28672, 4096, 14336, 2.0, 2.0, True, True)], on)
    ideal_s = 2048 * 28672 * 4096 / (on.macs * on.clock_hz)
    assert cost.compute_s == pytest.approx(ideal_s, rel=0.01)
    (few,) = search([GemmShape("up", 8, 28672, 4096, 14336, 2.0, 2.0, True, True)], on)
    assert few.compute_s == pytest.approx(ideal_s * 128 / 2048, rel=0.01)  # a tile costs 128 rows at least


def test_a_buffer_that_holds_no_tiles_is_refused_with_the_numbers() -> None:
    tiny = machine("tpuv6e").with_(compute_bytes=4096)
    with pytest.raises(ConfigError, match=r"machine.compute_buffer of .* cannot hold the tiles of 'up'; it needs"):
        search([GemmShape("up", 128, 4096, 4096, 4096, 2.0, 2.0)], tiny)


def test_each_technique_reduces_its_own_cost() -> None:
    base, work = study(), IterationWork(prefill_tokens=2048, prefill_past=30_000, decodes=32, kv_tokens=65536)
    fused = layers_of(base, [work])[0]
    spilled = layers_of(base._replace(techniques=TechniqueSet(fusion="off")), [work])[0]
    plain = layers_of(base._replace(techniques=TechniqueSet(flash_attention=False)), [work])[0]
    slow = layers_of(base._replace(techniques=TechniqueSet(double_buffering=False)), [work])[0]
    total = [sum(op.hbm_bytes for op in layer.others) for layer in (fused, spilled, plain)]
    assert total[1] > total[0]
    assert plain.chunk.hbm_bytes > 10 * fused.chunk.hbm_bytes
    bandwidth = base.machine.bandwidth
    assert all(a.seconds(bandwidth) > b.seconds(bandwidth)
               for a, b in zip(slow.others, fused.others, strict=True) if b.hbm_bytes)  # fmt: skip
