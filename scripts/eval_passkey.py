"""Measure how often a model finds a passkey hidden in a long document.

``--url http://127.0.0.1:8000`` asks an OpenAI-compatible server, ``--local`` runs the embedded model in this process
with transformers. Lengths are log-uniform; an answer counts only if it is the passkey and nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headway.runtime.embedded import model_path
from headway.runtime.embedded.passkey import PasskeyDocument, make_document

MAX_TOKENS = 12
Ask = Callable[[PasskeyDocument], str]


def server(url: str, model: str, chat: bool) -> Ask:
    """Ask an OpenAI-compatible server."""

    def ask(document: PasskeyDocument) -> str:
        body: dict[str, object] = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0}
        if chat:
            body["messages"] = [{"role": "user", "content": document.message}]
        else:
            body["prompt"] = document.prompt
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/{'chat/completions' if chat else 'completions'}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=3600) as reply:
            choice = json.load(reply)["choices"][0]
        return str(choice["message"]["content"] if chat else choice["text"])

    return ask


def local(path: Path, threads: int, dtype: str, chat: bool) -> Ask:
    """Ask the checkpoint at ``path`` through transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa")

    def ask(document: PasskeyDocument) -> str:
        if chat:
            messages = [{"role": "user", "content": document.message}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        else:
            text = tokenizer.bos_token + document.prompt
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    return ask


def main() -> int:
    """Run the trials; exit with 0 when at least 99 % are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="base address of an OpenAI-compatible server")
    where.add_argument("--local", action="store_true", help="run in this process with transformers")
    parser.add_argument("--model", default="headway-embedded", help="model name to send (default: %(default)s)")
    parser.add_argument("--path", type=Path, default=model_path(), help="checkpoint, for --local and to count tokens")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--min", type=int, default=1024, help="shortest document in tokens")
    parser.add_argument("--max", type=int, default=65536, help="longest document in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat", action="store_true", help="ask through the chat template")
    parser.add_argument("--threads", type=int, default=1, help="for --local")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="for --local")
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.path / "tokenizer.json"))
    if args.local:
        ask = local(args.path, args.threads, args.dtype, args.chat)
    else:
        ask = server(args.url, args.model, args.chat)
    rng, began = random.Random(args.seed), time.monotonic()
    buckets: dict[int, list[bool]] = {}
    for trial in range(args.trials):
        length = round(math.exp(rng.uniform(math.log(args.min), math.log(args.max))))
        document = make_document(length, args.seed * 1_000_003 + trial, lambda text: len(tokenizer.encode(text).ids))
        answer = ask(document).strip()
        buckets.setdefault(length.bit_length() - 1, []).append(answer == document.passkey)
        if answer != document.passkey:
            print(f"wrong: {length} tokens, depth {document.depth:.2f}: {document.passkey} -> {answer!r}", flush=True)
    for power in sorted(buckets):
        results = buckets[power]
        print(f"{2**power:>8} to {2 ** (power + 1) - 1:>8} tokens: {sum(results)}/{len(results)}")
    right = sum(map(sum, buckets.values()))
    share = right / max(1, args.trials)
    print(f"passkeys found: {right}/{args.trials} ({share:.1%}) in {time.monotonic() - began:.0f} s")
    return 0 if share >= 0.99 else 1


if __name__ == "__main__":
    sys.exit(main())
