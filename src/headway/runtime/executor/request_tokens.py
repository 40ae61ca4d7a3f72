"""The tokens of one request where the model is: its prompt, as received once, and what it has generated."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headway.core.errors import InvariantError
from headway.core.sampling import SamplingParams
from headway.runtime.model.sampling import SamplerState, make_state


class RequestTokens:
    """A request's token state on one rank. `known` counts prompt and generated tokens.

    Ids are kept only on ranks that embed or sample, and may arrive after they are counted: `count` is called with the
    plan, `append` with the token. Only the rank that samples has a `sampler`.
    """

    __slots__ = ("_prompt", "_prompt_tokens", "known", "last", "output", "sampler")

    def __init__(self, prompt_tokens: int, prompt: memoryview | bytes | None, sampler: SamplerState | None) -> None:
        self._prompt = None if prompt is None else np.frombuffer(prompt, dtype=np.int32)
        self._prompt_tokens = prompt_tokens
        self.known = prompt_tokens
        self.output: list[int] = []
        self.last = -1 if self._prompt is None else int(self._prompt[-1])
        self.sampler = sampler

    @property
    def behind(self) -> bool:
        """Whether tokens have been counted whose ids have not arrived."""
        return self._prompt_tokens + len(self.output) < self.known

    def count(self) -> None:
        """Count one token more. Its id comes later, or never on ranks that do not need it."""
        self.known += 1

    def append(self, token: int) -> None:
        """Take the id of the oldest token that was counted without one."""
        self.output.append(token)
        self.last = token
        if self.sampler is not None:
            self.sampler.append(token)

    def learn(self, known: int, tokens: tuple[int, ...]) -> None:
        """Take tokens generated in another group or instance, behind the first `known` ones. Known ones are skipped."""
        self.known = max(self.known, known + len(tokens))
        if self._prompt is not None or self.sampler is not None:
            for token in tokens[self._prompt_tokens + len(self.output) - known :]:
                self.append(token)

    def tokens(self, start: int, count: int) -> Tensor:
        """Tokens [start, start + count) as int64, whether of the prompt or generated."""
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
    """A request's sampler. Only a repetition penalty looks at the prompt."""
    ids = np.empty(0, dtype=np.int32) if prompt is None else np.frombuffer(prompt, dtype=np.int32)
    return make_state(params, ids, vocab_size, eos)
