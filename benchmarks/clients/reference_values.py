"""Texts for lm-eval's tasks, and what transformers computes for them: written before the server is asked."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = 16
CONTEXT, CONTINUATION = 60, 1
"""Words, each one token of the reference checkpoint."""
GENERATED = 8


def write(model: Path, folder: Path) -> None:
    """Write `texts.jsonl` and `expected.json`. model: a checkpoint that `scripts/make_checkpoint.py` made."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rng = random.Random(17)
    lines, continuations, whole = [], [], []
    for _ in range(TEXTS):
        words = [f"t{rng.randrange(3, network.config.vocab_size)}" for _ in range(CONTEXT + CONTINUATION)]
        context = tokenizer.encode(" ".join(words[:CONTEXT]), add_special_tokens=False)
        greedy = network.generate(
            torch.tensor([context]), max_new_tokens=GENERATED, do_sample=False, eos_token_id=None, pad_token_id=1
        )[0, CONTEXT:].tolist()  # fmt: skip
        tokens = tokenizer.encode(" ".join(words), add_special_tokens=False)
        continuations.append(sum(log_probabilities(network, tokens)[CONTEXT - 1 :]))
        # lm-eval puts the beginning-of-text token before a text.
        whole.append(sum(log_probabilities(network, [tokenizer.bos_token_id, *tokens])))
        lines.append(
            {
                "text": " ".join(words), "context": " ".join(words[:CONTEXT]),
                "continuation": " " + " ".join(words[CONTEXT:]), "greedy": tokenizer.decode(greedy),
            }
        )  # fmt: skip
    expected = {
        "headway_continuation": math.exp(-sum(continuations) / TEXTS),
        "headway_text": math.exp(-sum(whole) / (TEXTS * (CONTEXT + CONTINUATION))),
    }
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "expected.json").write_text(json.dumps(expected))


@torch.inference_mode()
def log_probabilities(network: torch.nn.Module, tokens: list[int]) -> list[float]:
    """Natural logarithms of the probabilities of all tokens but the first, each given those before it."""
    logits = network(torch.tensor([tokens])).logits[0, :-1].double()
    chosen = torch.tensor(tokens[1:]).unsqueeze(1)
    return torch.log_softmax(logits, dim=-1).gather(1, chosen).squeeze(1).tolist()
