"""Every sampling setting against a slow reference; draws that depend on seed and position only; sane frequencies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import RequestError
from headway.core.request import SamplingParams
from headway.runtime.model.sampling import SamplerState, draw, make_state, sample, uniform

VOCAB = 50


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def state_of(prompt: list[int] | None = None, output: tuple[int, ...] = (), **fields: Any) -> SamplerState:
    state = make_state(SamplingParams(**fields), prompt or [1, 2, 3], VOCAB, [0])
    for token in output:
        state.append(token)
    return state


def slow_distribution(row: list[float], params: SamplingParams) -> list[float]:
    """Temperature, min_p, top-k, top-p one after the other, over a list."""
    peak = max(row)
    weights = [math.exp((value - peak) / params.temperature) for value in row]
    best = max(weights)
    weights = [w if w >= params.min_p * best * (1 - 1e-6) else 0.0 for w in weights]
    if 0 < params.top_k < len(row):
        edge = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [w if w >= edge else 0.0 for w in weights]
    if params.top_p < 1:
        target, held, edge = params.top_p * sum(weights), 0.0, 0.0
        for weight in sorted(weights, reverse=True):
            held, edge = held + weight, weight
            if held >= target * (1 - 1e-6):
                break
        weights = [w if w >= edge else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([1e-5, 0.1, 0.7, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB, VOCAB + 9]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_draws_invert_the_slow_distribution(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, chance: float
) -> None:
    row = logits_of(seed)[0]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    wanted = slow_distribution(row.double().tolist(), params)
    token = draw(row, params, chance)
    assert wanted[token] > 0
    below = sum(wanted[:token])
    assert below - 1e-5 <= chance <= below + wanted[token] + 1e-5


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 1000),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=12),
    presence=st.sampled_from([0.0, 0.5, -1.0]),
    frequency=st.sampled_from([0.0, 0.3, -0.2]),
    repetition=st.sampled_from([1.0, 1.5, 0.8]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=3),
    least=st.sampled_from([0, 3, 20]),
)
def test_edits_equal_their_definition(
    seed: int, output: list[int], presence: float, frequency: float, repetition: float, bias: Any, least: int
) -> None:
    row = logits_of(seed)[0]
    state = state_of(
        [5, 6, 6], tuple(output), presence_penalty=presence, frequency_penalty=frequency,
        repetition_penalty=repetition, logit_bias=bias, min_tokens=least, stop_token_ids=(9,), temperature=0.0,
    )  # fmt: skip
    wanted = row.double().tolist()
    for token in range(VOCAB):
        value = wanted[token]
        if token in (5, 6) or token in output:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * output.count(token) + presence * (token in output)
        value += bias.get(token, 0.0)
        wanted[token] = -math.inf if token in (0, 9) and len(output) < least else value
    assert torch.allclose(state.edited(row).double(), torch.tensor(wanted, dtype=torch.float64), atol=1e-4)
    assert torch.equal(row, logits_of(seed)[0])


def test_a_greedy_batch_is_the_argmax_and_ties_go_low() -> None:
    logits = logits_of(0, 6)
    logits[2, 7] = logits[2, 31] = 99.0
    got = [drawn.token for drawn in sample(logits, [state_of(temperature=0.0)] * 6, [4] * 6)]
    assert got == logits.argmax(-1).tolist()
    assert got[2] == 7


def test_ignored_ends_are_not_withheld() -> None:
    state = state_of(min_tokens=5, ignore_eos=True, temperature=0.0)
    assert state.simple


@settings(max_examples=30, deadline=None, derandomize=True)
@given(order=st.permutations(range(6)), taken=st.integers(1, 6))
def test_what_a_request_draws_does_not_depend_on_its_batch(order: list[int], taken: int) -> None:
    logits = logits_of(3, 6)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"seed": 5}, {"seed": 6, "top_p": 0.8}, {"seed": 7, "top_k": 4, "logprobs": 3},
        {"seed": 8, "presence_penalty": 1.0}, {"seed": -9, "min_p": 0.1},
    ]  # fmt: skip
    alone = [sample(logits[i : i + 1], [state_of(**kinds[i])], [10 + i])[0] for i in range(6)]
    chosen = order[:taken]
    batch = sample(logits[chosen], [state_of(**kinds[i]) for i in chosen], [10 + i for i in chosen])
    assert batch == [alone[i] for i in chosen]


def test_a_request_computed_again_continues_its_stream() -> None:
    params = {"seed": 11, "temperature": 1.3, "frequency_penalty": 0.4}
    rows = logits_of(4, 20)
    state, tokens = state_of(**params), []
    for step in range(20):
        tokens.append(sample(rows[step : step + 1], [state], [step])[0].token)
        state.append(tokens[-1])
    again = state_of(output=tuple(tokens[:12]), **params)
    assert sample(rows[12:13], [again], [12])[0].token == tokens[12]


def test_uniforms_are_uniform_independent_and_pinned() -> None:
    values = np.array([uniform(seed, position) for seed in range(40) for position in range(100)])
    assert values.min() >= 0
    assert values.max() < 1
    assert len(set(values.tolist())) == len(values)
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 43.8
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05
    assert uniform(2**63, 5) == uniform(-(2**63), 5)


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.5, "top_k": 12}, {"top_p": 0.9}, {"min_p": 0.02}])
def test_frequencies_pass_a_chi_square(fields: dict[str, Any]) -> None:
    params = SamplingParams(seed=1, **fields)
    row = logits_of(8)[0]
    wanted = np.array(slow_distribution(row.double().tolist(), params)) * 2000
    state = make_state(params, [1], VOCAB, [0])
    drawn = [sample(row[None], [state], [position])[0].token for position in range(2000)]
    counts = np.bincount(drawn, minlength=VOCAB)
    assert counts[wanted == 0].sum() == 0
    large = wanted >= 5
    observed, expected = np.append(counts[large], counts[~large].sum()), np.append(wanted[large], wanted[~large].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    assert ((observed - expected) ** 2 / expected).sum() < freedom + 4 * math.sqrt(2 * freedom) + 4


def test_logprobs_are_the_models_own() -> None:
    row = logits_of(9)
    state = state_of(temperature=0.0, logprobs=5, logit_bias={17: 100.0})
    drawn = sample(row, [state], [0])[0]
    wanted = torch.log_softmax(row[0].double(), -1)
    assert drawn.token == 17
    assert drawn.logprobs is not None
    assert drawn.logprobs.logprob == pytest.approx(float(wanted[17]), abs=1e-4)
    assert [token for token, _ in drawn.logprobs.top] == wanted.topk(5).indices.tolist()
    assert [value for _, value in drawn.logprobs.top] == pytest.approx(wanted.topk(5).values.tolist(), abs=1e-4)
    none = sample(row, [state_of(temperature=0.0, logprobs=0)], [0])[0].logprobs
    assert none is not None
    assert none.top == ()


@pytest.mark.parametrize("fill", [-math.inf, math.inf, math.nan, 0.0, 3e38, -3e38])
def test_extreme_rows_still_give_a_token(fill: float) -> None:
    row = torch.full((1, VOCAB), fill)
    for fields in ({"temperature": 1e-5, "top_p": 1e-9}, {"temperature": 2.0, "top_k": 3, "min_p": 1.0}, {"seed": 1}):
        assert 0 <= sample(row, [state_of(**fields)], [0])[0].token < VOCAB


def test_a_bias_outside_the_vocabulary_is_the_requests_fault() -> None:
    with pytest.raises(RequestError, match=f"token {VOCAB}") as caught:
        state_of(logit_bias={VOCAB: 1.0})
    assert caught.value.param == "logit_bias"
