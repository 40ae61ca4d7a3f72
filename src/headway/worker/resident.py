"""The tokens of one request where the model is: its prompt, as received once, and what it has generated."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headway.core.sampling import SamplingParams
from headway.model.sampling import SamplerState, make_state


class Resident:
    """A request's token state. `known` counts prompt and generated tokens."""

    __slots__ = ("last", "output", "prompt", "sampler")

    def __init__(self, prompt: memoryview, params: SamplingParams, vocab_size: int, eos: tuple[int, ...]) -> None:
        self.prompt = np.frombuffer(prompt, dtype=np.int32)
        self.output: list[int] = []
        self.last = int(self.prompt[-1])
        self.sampler: SamplerState = make_state(params, self.prompt, vocab_size, eos)

    @property
    def known(self) -> int:
        return int(self.prompt.size) + len(self.output)

    def append(self, token: int) -> None:
        self.output.append(token)
        self.last = token
        self.sampler.append(token)

    def tokens(self, start: int, count: int) -> Tensor:
        """Tokens [start, start + count) as int64, whether of the prompt or generated."""
        stop = start + count
        size = int(self.prompt.size)
        parts = []
        if start < size:
            parts.append(self.prompt[start : min(stop, size)].astype(np.int64))
        if stop > size:
            parts.append(np.array(self.output[max(start, size) - size : stop - size], dtype=np.int64))
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
