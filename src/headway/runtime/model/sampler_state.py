"""Sampling state of one request: the tokens that penalties count, and the edits of logits that its settings need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.errors import RequestError
from headway.core.sampling import SamplingParams

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
