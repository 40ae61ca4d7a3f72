"""Greedy answers by transformers, and the prompts of tests with real processes."""

from __future__ import annotations

from pathlib import Path


class GreedyReference:
    """Greedy tokens by transformers, one request at a time, whole prompt at once."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def tokens(self, prompt: list[int], count: int) -> list[int]:
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
