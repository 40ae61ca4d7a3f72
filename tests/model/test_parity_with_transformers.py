"""Logits and greedy tokens equal transformers', however requests are chunked, batched, interleaved and scattered."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.checkpoints import FAMILIES, make_tiny
from torch import Tensor

from headway.runtime.attention.backend import BatchSegment
from headway.runtime.model.decoder import DecoderModel
from headway.runtime.model.loading import load_decoder

LENGTH = 48
BLOCK = 8

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "phi3-partial-rotary": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                          "partial_rotary_factor": 0.5}}),
}  # fmt: skip


@functools.cache
def checkpoint(variant: str, dtype: str = "float32") -> Path:
    family, overrides = VARIANTS[variant]
    return make_tiny(family, tempfile.mkdtemp(prefix="headway-tiny-"), dtype=dtype, **overrides)


@functools.cache
def models(variant: str, dtype: str = "float32") -> tuple[DecoderModel, Any]:
    import transformers

    path = checkpoint(variant, dtype)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return load_decoder(path), reference.eval()


def prompts(count: int) -> Tensor:
    return torch.randint(3, 128, (count, LENGTH), generator=torch.Generator().manual_seed(count))


def scattered(count: int, seed: int) -> list[tuple[tuple[int, int], ...]]:
    each = LENGTH // BLOCK
    order = torch.randperm(count * each, generator=torch.Generator().manual_seed(seed)).tolist()
    return [tuple((slot * BLOCK, BLOCK) for slot in order[i * each : (i + 1) * each]) for i in range(count)]


def run_iterations(decoder: DecoderModel, tokens: Tensor, cuts: list[list[int]], idle: list[int], seed: int) -> Tensor:
    """All logits of all requests, computed over iterations of at most one chunk a request; `idle` skips turns."""
    count = len(tokens)
    pool = decoder.make_pool(count * LENGTH)
    pool.data.fill_(float("nan"))
    runs = scattered(count, seed)
    done = [0] * count
    logits = torch.full((count, LENGTH, decoder.config.vocab_size), float("nan"))
    turn = 0
    while any(at < LENGTH for at in done):
        segments, rows, row = [], [], 0
        for index in range(count):
            waits = turn < len(idle) and idle[turn] == index and count > 1
            if done[index] == LENGTH or waits:
                continue
            stop = next((cut for cut in cuts[index] if cut > done[index]), LENGTH)
            segments.append(BatchSegment(row, stop - done[index], done[index], runs[index]))
            rows.append((index, done[index], stop))
            row += stop - done[index]
            done[index] = stop
        turn += 1
        if not segments:
            continue
        flat = torch.cat([tokens[i, a:b] for i, a, b in rows])
        positions = torch.cat([torch.arange(a, b) for _, a, b in rows])
        out = decoder.forward(flat, positions, decoder.backend.plan(segments, pool), None)
        for (index, a, b), piece in zip(rows, out.split([b - a for _, a, b in rows]), strict=True):
            logits[index, a:b] = piece
    return logits


CUTS = st.lists(st.integers(1, LENGTH - 1), max_size=8, unique=True).map(sorted)
DECODES = st.just([*range(LENGTH // 2, LENGTH)])


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    cuts=st.lists(CUTS | DECODES, min_size=1, max_size=4),
    idle=st.lists(st.integers(0, 3), max_size=6),
    seed=st.integers(0, 99),
)
def test_fp32_logits_equal_in_any_chunking(variant: str, cuts: list[list[int]], idle: list[int], seed: int) -> None:
    decoder, reference = models(variant)
    tokens = prompts(len(cuts))
    with torch.inference_mode():
        wanted = reference(tokens).logits
    got = run_iterations(decoder, tokens, cuts, idle, seed)
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_greedy_tokens_equal(variant: str) -> None:
    decoder, reference = models(variant)
    prompt = prompts(1)[:, :16]
    with torch.inference_mode():
        wanted = reference.generate(prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False)[0, 16:].tolist()
    pool, runs = decoder.make_pool(64), ((0, 64),)
    forbidden = torch.tensor([reference.config.eos_token_id])
    got: list[int] = []
    fresh, past = prompt[0], 0
    for _ in range(24):
        count = len(fresh)
        plan = decoder.backend.plan([BatchSegment(0, count, past, runs)], pool)
        row = decoder.forward(fresh, torch.arange(past, past + count), plan, torch.tensor([count - 1]))[0].clone()
        row[forbidden] = -torch.inf
        past, got = past + count, [*got, int(row.argmax())]
        fresh = torch.tensor(got[-1:])
    assert got == wanted


def test_yi_keeps_its_own_rotary_base_and_its_first_class_name_is_known(tmp_path: Path) -> None:
    """Yi is Llama's class with other values. Its first release named the class YiForCausalLM, which transformers does
    not have; the same tensors must give the same logits under that name."""
    decoder, reference = models("yi")
    assert reference.config.rope_parameters["rope_theta"] == 5_000_000.0
    first = tmp_path / "first"
    shutil.copytree(checkpoint("yi"), first)
    fields = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(fields | {"architectures": ["YiForCausalLM"], "model_type": "Yi"}))
    named = load_decoder(first)
    tokens = prompts(1)
    assert torch.equal(run_iterations(named, tokens, [[]], [], 0), run_iterations(decoder, tokens, [[]], [], 0))


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "phi3", "yi"])
@pytest.mark.parametrize("cuts", [[], [*range(1, LENGTH)], [7, 30, 31, 32]])
def test_bf16_stays_within_a_bound_and_keeps_clear_tokens(variant: str, cuts: list[int]) -> None:
    decoder, reference = models(variant, "bfloat16")
    assert decoder.dtype == torch.bfloat16
    tokens = prompts(3)
    with torch.inference_mode():
        wanted = reference(tokens).logits
    got = run_iterations(decoder, tokens, [cuts] * 3, [], 0)
    error = (got - wanted).abs()
    bound = 0.08 * float(wanted.abs().max())
    assert error.max() <= bound
    top = wanted.topk(2, dim=-1).values
    clear = top[..., 0] - top[..., 1] > 2 * error.amax(-1)
    assert clear.float().mean() > 0.5
    assert torch.equal(got.argmax(-1)[clear], wanted.argmax(-1)[clear])
