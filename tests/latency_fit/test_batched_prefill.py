"""Several prompts in a batch: each further one costs a share of its time alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.batch import Chunk, DecodeGroup, GroupBatch
from headway.perf.hardware import ParallelLayout, accelerator, model
from headway.perf.latency.base import BatchLoad, LatencyModel, beside_prompts, solve_tokens
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.fitted import fitted
from headway.perf.latency.groups import part_load
from headway.perf.latency.table import TableLatency
from headway_research.fit.operators import batched_rows, fit_batched_prefill
from headway_research.fit.readers import DECODE, PREFILL, OperatorProfile


def profile(family: str = PREFILL) -> OperatorProfile:
    """Short chunks fill a device that is a quarter used, long ones come one after the other."""
    batch, chunk = (g.ravel().astype(np.float64) for g in np.meshgrid([1, 2, 8], [64, 4096], indexing="ij"))
    alone, share = np.where(chunk == 64, 0.02, 1.0), np.where(chunk == 64, 0.25, 1.0)
    x = {"batch": batch, "chunk": chunk, "past": 0 * batch, "q_heads": 0 * batch + 8, "kv_heads": 0 * batch + 1}
    return OperatorProfile(family, "prefill", "a100-80gb", "vllm", "grid", x, alone * (1 + (batch - 1) * share))


def test_the_fit_gives_back_what_it_was_fitted_to() -> None:
    fit = fit_batched_prefill([profile()])
    assert fit is not None
    assert fit.share == pytest.approx((0.25, 1.0))
    rows, alone = batched_rows(profile())
    assert fit.batch_ms(alone, rows.x["batch"], rows.x["chunk"], rows.x["q_heads"]) == pytest.approx(rows.ms)


def test_rows_of_single_prompts_are_no_batch() -> None:
    one = profile().where(profile().x["batch"] == 1)
    assert len(batched_rows(one)[0]) == 0
    assert fit_batched_prefill([one, profile(DECODE)]) is None


@cache
def llama() -> TableLatency:
    return fitted("h100-80gb", "llama-3-8b", ParallelLayout(tp=8))


def batch_of(model: LatencyModel, chunks: Sequence[tuple[int, int]]) -> BatchLoad:
    """Return the load of (tokens, cached tokens) chunks in one batch."""
    prefills = tuple(Chunk(f"r{at}", past, tokens, last=False) for at, (tokens, past) in enumerate(chunks))
    return part_load(model, GroupBatch(0, DecodeGroup(), prefills))


def test_a_batch_of_prompts_takes_less_than_their_sum() -> None:
    chunks = [(256, 0)] * 8
    alone_s = llama().attention_s(0, 256)
    assert alone_s < batch_of(llama(), chunks).chunk_s < 4 * alone_s
    assert batch_of(llama(), chunks[:1]).chunk_s == alone_s


def test_a_corrected_model_batches_as_its_base_does_times_its_scale() -> None:
    corrected = CorrectedLatency(llama())
    corrected._k_chunk = 2.0
    chunks = [(64, 0), (512, 4096), (64, 128)]
    assert batch_of(corrected, chunks).chunk_s == pytest.approx(2 * batch_of(llama(), chunks).chunk_s)


@pytest.mark.parametrize("device", ["a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb", "l40s-48gb"])
def test_no_further_prompt_reads_its_history_faster_than_the_device_can(device: str) -> None:
    shape, spec = model("llama-3-8b"), accelerator(device)
    further = beside_prompts(fitted(device, "llama-3-8b"), BatchLoad(256, 0, 0, 0.01))
    for past in (4096, 12_416, 131_072, 1_000_000):
        for chunk in (1, 64, 512, 4096):
            read_s = past * shape.kv_bytes_per_token / spec.bandwidth
            compute_s = shape.attention_flops(chunk, past) / spec.flops
            assert further.attention_s(past, chunk) > max(read_s, compute_s)


@given(st.integers(0, 100_000), st.integers(1, 4096), st.floats(0.0, 0.2), st.lists(st.integers(1, 2048), max_size=3))
@settings(max_examples=60, deadline=None)
def test_the_largest_chunk_beside_other_prompts_is_found_exactly(
    past: int, limit: int, budget_s: float, others: list[int]
) -> None:
    base = llama()
    load = batch_of(base, [(tokens, 0) for tokens in others])
    further = beside_prompts(base, load)
    tokens, _ = solve_tokens(further, load, past, limit, budget_s)
    sizes = np.arange(1, limit + 1)
    whole_s = base.token_s(load.tokens + 1, load.tokens + limit) + further.chunk_s(past, 1, limit) + load.chunk_s
    fits = sizes[whole_s <= budget_s + 1e-12]
    assert tokens == (int(fits[-1]) if fits.size else 0)
