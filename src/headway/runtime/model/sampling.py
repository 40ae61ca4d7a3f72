"""Sampling of tokens from logits. A request's token depends on its own row, settings, seed and position only.

A request's token depends on its own row, settings, seed and position only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.errors import RequestError
from headway.core.request import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would only lose the order of near ties."""


class SamplerState:
    """One request's sampling state, made by `make_state`; `append` records each accepted token.

    It holds tensors of the vocabulary's size only if a penalty needs them. It holds no random state: draws come from
    (seed, position), so that a state made again from the same tokens continues the same stream.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Tensor, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.params = params
        self.seed = params.seed or 0
        self.generated = 0
        self.greedy = params.temperature < GREEDY_BELOW
        self._bias = _bias_of(params, vocab_size)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
        ends = {token for token in ends if 0 <= token < vocab_size}
        self._ends = torch.tensor(sorted(ends), dtype=torch.int64) if params.min_tokens > 0 and ends else None
        counted = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._counts = torch.zeros(vocab_size, dtype=torch.float32) if counted else None
        self._seen: Tensor | None = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            # A repetition penalty counts presence, not occurrences: distinct ids suffice.
            self._seen[prompt_ids] = True
        self._always_edits = counted or self._seen is not None or self._bias is not None

    @property
    def edits(self) -> bool:
        """Whether `edited` would change anything for the next token."""
        return self._always_edits or self._withholds_end

    @property
    def simple(self) -> bool:
        """Whether the next token is the plain argmax, without log-probabilities."""
        return self.greedy and self.params.logprobs is None and not self.edits

    def append(self, token: int) -> None:
        """Record an accepted token. Called once for each, in order."""
        self.generated += 1
        if self._counts is not None:
            self._counts[token] += 1
        if self._seen is not None:
            self._seen[token] = True

    def edited(self, row: Tensor) -> Tensor:
        """Return a copy of the logits (vocab,) after penalties, bias and withheld end tokens, in this order.

        Repetition counts prompt and output (positive logits are divided, negative ones multiplied); presence and
        frequency count output only. End and stop tokens are withheld until min_tokens have been generated.
        """
        row = row.clone()
        params = self.params
        if self._seen is not None:
            penalty = params.repetition_penalty
            row = torch.where(self._seen, torch.where(row > 0, row / penalty, row * penalty), row)
        if self._counts is not None:
            row.sub_(self._counts, alpha=params.frequency_penalty)
            row.sub_((self._counts > 0).to(row.dtype), alpha=params.presence_penalty)
        if self._bias is not None:
            row.index_add_(0, *self._bias)
        if self._withholds_end and self._ends is not None:
            # Last, so that no bias can bring an end token back.
            row.index_fill_(0, self._ends, -math.inf)
        return row

    @property
    def _withholds_end(self) -> bool:
        return self._ends is not None and self.generated < self.params.min_tokens


def make_state(
    params: SamplingParams,
    prompt_ids: Tensor | NDArray[np.integer[Any]] | Sequence[int],
    vocab_size: int,
    eos_ids: Sequence[int],
) -> SamplerState:
    """Make a request's state, before its first token. RequestError: logit_bias has an id outside the vocabulary."""
    seen = torch.empty(0, dtype=torch.int64)
    # Only a repetition penalty reads the prompt: a scan of a million tokens is otherwise avoided.
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.asarray(prompt_ids)).astype(np.int64))
    return SamplerState(params, seen, vocab_size, eos_ids)


def _bias_of(params: SamplingParams, vocab_size: int) -> tuple[Tensor, Tensor] | None:
    if not params.logit_bias:
        return None
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise RequestError(f"logit_bias names token {token}, but the vocabulary has {vocab_size}", "logit_bias")
    ids = torch.tensor(list(params.logit_bias.keys()), dtype=torch.int64)
    return ids, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)


_NUCLEUS_LOOKS = (256, 8192)
"""How many of the heaviest tokens are tried as the nucleus before the whole vocabulary is sorted."""


class SampledToken(NamedTuple):
    """One drawn token, and its log-probabilities if the request asked for them."""

    token: int
    logprobs: TokenLogprobs | None


@torch.inference_mode()
def sample(logits: Tensor, states: Sequence[SamplerState], positions: Sequence[int]) -> list[SampledToken]:
    """Draw one token for each row of logits (R, vocab) fp32, left untouched. Called once an iteration.

    states, positions: one for each row; a position is the index in its sequence of the token that is drawn. A batch of
    greedy requests without edits costs one argmax. Ties go to the lowest token id.
    """
    best = logits.argmax(dim=-1).tolist()
    if all(state.simple for state in states):
        return [SampledToken(token, None) for token in best]
    # Draws branch on each row's settings: they are done on CPU, wherever logits were computed.
    logits = logits.cpu()
    sampled = []
    for row, state, position, token in zip(logits, states, positions, best, strict=True):
        if not state.simple:
            edited = state.edited(row) if state.edits else row
            if state.greedy:
                token = int(edited.argmax()) if state.edits else token
            else:
                token = draw(edited, state.params, uniform(state.seed, position))
        count = state.params.logprobs
        sampled.append(SampledToken(token, None if count is None else _report(row, token, count)))
    return sampled


def draw(row: Tensor, params: SamplingParams, chance: float) -> int:
    """Invert the cumulative distribution of one row (vocab,) at `chance` in [0, 1).

    Order: temperature, min_p, top-k, top-p, each renormalised. Tokens that tie with the last one kept are kept too, and
    the distribution is walked in token order, so the result is a function of the values alone. A row without a finite
    maximum (everything withheld, or a broken model) gives its argmax.
    """
    peak = float(row.max())
    if not math.isfinite(peak):
        return int(row.argmax())
    # Relative to the peak, so that exp cannot overflow and min_p is a plain threshold: p / p_max >= min_p.
    scaled = (row - peak) / params.temperature
    if params.min_p > 0:
        scaled = scaled.masked_fill(scaled < math.log(params.min_p), -math.inf)
    if 0 < params.top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -math.inf)
    weights = torch.exp(scaled)
    if params.top_p < 1:
        weights = weights.masked_fill(weights < _nucleus_edge(weights, params.top_p), 0.0)
    # fp64: over a large vocabulary fp32 would lose small weights behind large sums.
    walked = torch.cumsum(weights, dim=0, dtype=torch.float64)
    token = int(torch.searchsorted(walked, chance * float(walked[-1]), right=True))
    # Rounding may put the chance beyond the last sum: take the last token that has weight.
    return token if token < row.numel() else int(weights.nonzero()[-1])


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) of a seed and a position: Philox with the seed as key, the position as counter."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=position).random_raw()
    # 53 random bits, the precision of a double.
    return float(int(bits) >> 11) * 2.0**-53


def _nucleus_edge(weights: Tensor, top_p: float) -> Tensor:
    """Return the least weight in the smallest set of heaviest tokens that has `top_p` of the total weight."""
    target = top_p * float(weights.sum(dtype=torch.float64))
    # The nucleus is usually small: partial top-k first, the whole vocabulary only if these do not reach the target.
    for count in (*_NUCLEUS_LOOKS, weights.numel()):
        heaviest = weights.topk(min(count, weights.numel())).values
        reached = torch.cumsum(heaviest, dim=0, dtype=torch.float64) >= target
        if bool(reached[-1]):
            return heaviest[int(reached.to(torch.int8).argmax())]
    return heaviest[-1]


def _report(row: Tensor, token: int, count: int) -> TokenLogprobs:
    """Return log-probabilities, before any edit, of the drawn token and of the `count` most likely ones."""
    total = float(torch.logsumexp(row, dim=0))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, ids = row.topk(min(count, row.numel()))
        top = tuple((index, value - total) for index, value in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(row[token]) - total, top)


def score(rows: Tensor, tokens: Tensor, count: int) -> list[TokenLogprobs]:
    """Return the log-probability of a given token in each row (R, vocab), and of the `count` most likely ones."""
    totals = torch.logsumexp(rows, dim=1)
    given = (rows.gather(1, tokens.unsqueeze(1)).squeeze(1) - totals).tolist()
    if not count:
        return [TokenLogprobs(value, ()) for value in given]
    values, ids = rows.topk(min(count, rows.shape[1]), dim=1)
    tops = zip(ids.tolist(), (values - totals.unsqueeze(1)).tolist(), strict=True)
    return [TokenLogprobs(value, tuple(zip(*top, strict=True))) for value, top in zip(given, tops, strict=True)]
