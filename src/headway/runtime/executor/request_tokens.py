"""Tokens of one request on a rank: its prompt, received once, and its generated tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headway.core.errors import InvariantError
from headway.core.sampling import SamplingParams
from headway.runtime.executor.prompt_scores import PromptScores
from headway.runtime.model.sampling import SamplerState, make_state


class RequestTokens:
    """A request's token state on one rank.

    Ids are kept only on ranks that embed or sample, and may arrive after they are counted: `count` is called with the
    plan, `append` with the token.
    """

    __slots__ = ("_prompt", "_prompt_tokens", "known", "last", "output", "sampler", "scores")

    def __init__(self, prompt_tokens: int, prompt: memoryview | bytes | None, sampler: SamplerState | None) -> None:
        self._prompt = None if prompt is None else np.frombuffer(prompt, dtype=np.int32)
        self._prompt_tokens = prompt_tokens
        self.known = prompt_tokens
        """Prompt and generated tokens, including those whose ids have not arrived."""
        self.output: list[int] = []
        self.last = -1 if self._prompt is None else int(self._prompt[-1])
        """The newest id; -1 where this rank keeps none."""
        self.sampler = sampler
        """Set on the rank that samples only."""
        self.scores: PromptScores | None = None
        """Of a request that asks for its prompt's log-probabilities."""
        if sampler is not None and sampler.params.prompt_logprobs is not None:
            self.scores = PromptScores(sampler.params.prompt_logprobs, prompt_tokens)

    @property
    def behind(self) -> bool:
        """Whether tokens have been counted whose ids have not arrived."""
        return self._prompt_tokens + len(self.output) < self.known

    def count(self) -> None:
        """Count one more token. Its id arrives later, or never on ranks that do not need it."""
        self.known += 1

    def append(self, token: int) -> None:
        """Append the id of the oldest token that was counted without one."""
        self.output.append(token)
        self.last = token
        if self.sampler is not None:
            self.sampler.append(token)

    def learn(self, known: int, tokens: tuple[int, ...]) -> None:
        """Append tokens generated in another group or instance, behind the first `known`. Those held are skipped."""
        self.known = max(self.known, known + len(tokens))
        if self._prompt is not None or self.sampler is not None:
            for token in tokens[self._prompt_tokens + len(self.output) - known :]:
                self.append(token)

    def tokens(self, start: int, count: int) -> Tensor:
        """Return tokens [start, start + count) of prompt and output as int64."""
        if self._prompt is None:
            raise InvariantError("this rank keeps no prompts")
        stop = start + count
        size = self._prompt_tokens
        parts = []
        if start < size:
            parts.append(self._prompt[start : min(stop, size)].astype(np.int64))
        if stop > size:
            parts.append(np.array(self.output[max(start, size) - size : stop - size], dtype=np.int64))
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))


def sampler_of(
    prompt: memoryview | bytes | None, params: SamplingParams, vocab_size: int, eos: tuple[int, ...]
) -> SamplerState:
    """Make a request's sampler. Only a repetition penalty reads the prompt."""
    ids = np.empty(0, dtype=np.int32) if prompt is None else np.frombuffer(prompt, dtype=np.int32)
    return make_state(params, ids, vocab_size, eos)
