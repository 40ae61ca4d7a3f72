"""Greedy answers by transformers, and the prompts of tests with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class GreedyReference:
    """Greedy tokens by transformers in fp32, one request at a time, whole prompt at once. Answers are kept."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        key = tuple(prompt)
        if len(self._answers.get(key, ())) < count:  # a shorter answer is the beginning of a longer one
            self._answers[key] = self._generate(prompt, count)
        return self._answers[key][:count]

    def answer(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """The tokens and their log-probabilities."""
        tokens = self.tokens(prompt, count)
        rows = self.logits(prompt + tokens[:-1])[len(prompt) - 1 :].log_softmax(-1)
        return tokens, rows.max(-1).values.tolist()

    def scores(self, prompt: list[int]) -> list[list[float]]:
        """Log-probabilities over the vocabulary, at each position of the prompt, of the token after it."""
        found: list[list[float]] = self.logits(prompt).double().log_softmax(-1).tolist()
        return found

    def logits(self, prompt: list[int]) -> Any:
        """At each position of the prompt, of the token after it: a tensor."""
        with self._torch.inference_mode():
            return self._model(self._torch.tensor([prompt])).logits[0]

    def _generate(self, prompt: list[int], count: int) -> list[int]:
        ids = self._torch.tensor([prompt])
        with self._torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


def prompt_of(seed: int, length: int) -> list[int]:
    """Deterministic ids above the special ones of the tiny checkpoints."""
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 120 for i in range(length)]
