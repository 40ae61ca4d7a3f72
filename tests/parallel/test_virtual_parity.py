"""Tensor parallelism and stages change nothing: tokens equal one process, logits equal transformers'. Virtual ranks."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Ask, greedy, make_core, prompt_of, reference, serve
from virtual import VirtualWorld

from checkpoints import make_tiny
from headway.latency.layout import Layout
from headway.worker.local import LocalExecutor
from headway.worker.worker import Worker

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
LAYOUTS = ((2, 1), (1, 2), (2, 2), (4, 3))
"""T x S. With two KV heads, T = 4 copies each to two ranks; three layers make stages of unequal size."""
CHUNKINGS = ("static:1", "static:7", "static:64", "adaptive")


@functools.cache
def checkpoint(family: str, dtype: str = "float32") -> Path:
    extra: dict[str, Any] = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    if family == "mistral":
        extra["tie_word_embeddings"] = True
    return make_tiny(family, tempfile.mkdtemp(prefix="headway-tiny-"), dtype=dtype, num_hidden_layers=3, **extra)


@functools.cache
def expected(family: str, seed: int, length: int, count: int) -> list[int]:
    return greedy(checkpoint(family), prompt_of(seed, length), count)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("tp", "stages"), LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3)
@given(
    long=st.integers(70, 150),
    shorts=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), max_size=3),
    chunking=st.sampled_from(CHUNKINGS),
    schedule=st.sampled_from(("stream", "microbatch")),
)
def test_greedy_tokens_equal_transformers_with_shorts_beside_a_long_request(
    family: str, tp: int, stages: int, long: int, shorts: list[tuple[int, int]], chunking: str, schedule: str
) -> None:
    asks = [Ask(prompt_of(0, long), 6), *(Ask(prompt_of(i + 1, n), 8, at) for i, (n, at) in enumerate(shorts))]
    with VirtualWorld(checkpoint(family), Layout(tp=tp, stages=stages)) as world:
        core = make_core(world.executor, stages=stages, chunking=chunking, pipeline_schedule=schedule)
        got = serve(core, asks)
    wanted = [expected(family, 0, long, 6), *(expected(family, i + 1, n, 8) for i, (n, _) in enumerate(shorts))]
    assert got == wanted


def heads_of(world: VirtualWorld) -> list[torch.Tensor]:
    """The rows of logits that the sampling rank computes from now on, in order."""
    seen: list[torch.Tensor] = []
    decoder = next(w.decoder for w in world.workers if w.decoder.shard.last and w.decoder.shard.rank == 0)
    plain = decoder.head

    def head(hidden: torch.Tensor) -> torch.Tensor | None:
        logits = plain(hidden)
        assert logits is not None
        seen.extend(logits.clone())
        return logits

    decoder.head = head  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(("tp", "stages"), LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_equal_transformers(family: str, tp: int, stages: int, dtype: str) -> None:
    """fp32: within 1e-4 of the largest. bf16: within 0.12 of it, and clear tokens are equal (teacher-forced)."""
    folder = checkpoint(family, dtype)
    prompt, count = prompt_of(3, 90), 12
    with VirtualWorld(folder, Layout(tp=tp, stages=stages), dtype=dtype) as world:
        rows = heads_of(world)
        (tokens,) = serve(make_core(world.executor, stages=stages, chunking="static:17"), [Ask(prompt, count)])
    got = torch.stack(rows)
    with torch.inference_mode():
        wanted = reference(folder).float()(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    error, largest = (got - wanted).abs(), float(wanted.abs().max())
    assert got.shape == wanted.shape
    assert float(error.max()) <= (1e-4 if dtype == "float32" else 0.12) * largest
    top = wanted.topk(2, dim=-1).values
    clear = top[:, 0] - top[:, 1] > 2 * error.amax(-1)
    assert bool(clear.any())
    assert torch.equal(torch.tensor(tokens)[clear], wanted.argmax(-1)[clear])


def single(folder: Path, asks: list[Ask], blocks: int = 64, **scheduler: Any) -> list[list[int]]:
    from headway.model.loading import load_decoder

    executor = LocalExecutor(Worker(load_decoder(folder), blocks, 8, ()))
    return serve(make_core(executor, blocks, **scheduler), asks)


@pytest.mark.parametrize(("tp", "stages"), LAYOUTS)
def test_sampled_penalised_and_reported_tokens_equal_one_process(tp: int, stages: int) -> None:
    """Draws, penalties over prompt and output, log-probabilities: all on one rank, which must know enough for them."""
    folder = checkpoint("qwen2")
    asks = [
        Ask(prompt_of(0, 60), 12, 0, {"temperature": 0.9, "top_p": 0.9, "seed": 7}),
        Ask(prompt_of(1, 30), 12, 1, {"repetition_penalty": 1.3}),
        Ask(prompt_of(2, 33), 12, 2, {"frequency_penalty": 0.5, "presence_penalty": 0.3, "logit_bias": {9: 2.0}}),
        Ask(prompt_of(3, 9), 12, 3, {"temperature": 1.2, "seed": 3, "logprobs": 4}),
    ]
    wanted = single(folder, asks, chunking="static:16")
    with VirtualWorld(folder, Layout(tp=tp, stages=stages)) as world:
        assert serve(make_core(world.executor, stages=stages, chunking="static:16"), asks) == wanted


@pytest.mark.parametrize(("tp", "stages"), [(2, 2), (1, 3)])
def test_requests_that_are_recomputed_for_want_of_memory_stay_exact(tp: int, stages: int) -> None:
    folder = checkpoint("llama")
    asks = [Ask(prompt_of(i, 40), 60, i) for i in range(6)]
    with VirtualWorld(folder, Layout(tp=tp, stages=stages), kv_blocks=40) as world:
        core = make_core(world.executor, 40, stages=stages, reserve_tokens=0, chunking="static:16")
        got = serve(core, asks)
        assert core.stats().preemptions_total > 0
    assert got == [expected("llama", i, 40, 60) for i in range(6)]


def test_decodes_of_several_batches_alternate_between_stages() -> None:
    """With three stages three groups of decodes are in flight; each request's tokens are its own."""
    folder = checkpoint("phi3")
    asks = [Ask(prompt_of(i, 5 + i), 30, 2 * i) for i in range(9)]
    with VirtualWorld(folder, Layout(stages=3)) as world:
        got = serve(make_core(world.executor, stages=3), asks)
    assert got == [expected("phi3", i, 5 + i, 30) for i in range(9)]
