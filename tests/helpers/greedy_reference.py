"""Greedy answers by transformers, and the prompts of tests with real processes."""

from __future__ import annotations

from pathlib import Path


class GreedyReference:
    """Greedy tokens by transformers, one request at a time, whole prompt at once. Answers are kept."""

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

    def scores(self, prompt: list[int]) -> list[list[float]]:
        """Log-probabilities over the vocabulary, at each position of the prompt, of the token after it."""
        torch = self._torch
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt])).logits[0].double()
        found: list[list[float]] = torch.log_softmax(logits, dim=-1).tolist()
        return found

    def _generate(self, prompt: list[int], count: int) -> list[int]:
        torch = self._torch
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


def prompt_of(seed: int, length: int) -> list[int]:
    """Deterministic ids above the special ones of the tiny checkpoints."""
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 120 for i in range(length)]
