"""Several prompts in a batch: each further one costs a share of its time alone."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.batched_prefill import batched_rows, fit_batched_prefill

from headway.perf.latency.operators.profiles import DECODE, PREFILL, OperatorProfile


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
