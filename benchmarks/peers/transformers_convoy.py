"""The convoy against transformers' continuous batching on CPU, in process (it has no token-id HTTP endpoint).

    python benchmarks/peers/transformers_convoy.py --model out/reference --long-tokens 4096 --json out/transformers.json

Run in the development environment. Times are taken where tokens arrive in this process: no HTTP in them.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description="The convoy against transformers' continuous batching.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--long-tokens", type=int, default=32768)
    parser.add_argument("--short-tokens", type=int, default=200)
    parser.add_argument("--short-output", type=int, default=16)
    parser.add_argument("--short-interval", type=float, default=1.0)
    parser.add_argument("--max-seconds", type=float, default=600.0)
    parser.add_argument("--json", type=Path, required=True)
    a = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.bfloat16).eval()
    config = GenerationConfig(do_sample=False, max_new_tokens=a.short_output, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    rng = random.Random(0)
    vocabulary = model.config.vocab_size

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(2, vocabulary) for _ in range(tokens)]

    arrived: queue.Queue[tuple[str, float, int]] = queue.Queue()

    def listen() -> None:
        while manager.is_running():
            output: Any = manager.get_result(timeout=0.5)
            if output is not None:
                arrived.put((output.request_id, time.monotonic(), len(output.generated_tokens)))

    threading.Thread(target=listen, daemon=True).start()

    def send(name: str, tokens: int, output: int) -> None:
        manager.add_request(prompt(tokens), request_id=name, max_new_tokens=output, streaming=True)

    send("warm", a.short_tokens, 4)
    while arrived.get(timeout=300)[2] < 4:
        pass
    begun = time.monotonic()
    sent = {"long": begun}
    send("long", a.long_tokens, 1)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    gaps: list[float] = []
    while "long" not in first and time.monotonic() - begun < a.max_seconds:
        due = begun + len(sent) * a.short_interval
        try:
            name, at, _ = arrived.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            name = f"short-{len(sent)}"
            sent[name] = due
            send(name, a.short_tokens, a.short_output)
            continue
        if name in sent:
            gaps += [at - last[name]] if name in last and name != "long" else []
            first.setdefault(name, at - sent[name])
            last[name] = at
    open_shorts = {name for name in sent if name != "long"} - set(first)
    while open_shorts and time.monotonic() - begun < a.max_seconds:
        try:
            name, at, _ = arrived.get(timeout=10)
        except queue.Empty:
            break
        if name in sent and name not in first:
            first[name] = at - sent[name]
            open_shorts.discard(name)
    manager.stop(block=True, timeout=30)
    shorts = sorted(seconds for name, seconds in first.items() if name != "long")
    result = {
        "policy": "transformers-continuous-batching",
        "chunking": "as-served",
        "short": {"ttft_s": _percentiles(shorts), "tbt_s": _percentiles(sorted(gaps)), "n": len(shorts)},
        "long": {"ttft_s": {"p50": first.get("long")}, "alone_s": None, "unanswered_shorts": len(open_shorts)},
    }
    a.json.parent.mkdir(parents=True, exist_ok=True)
    a.json.write_text(json.dumps({"schema": "headway.convoy/1", "runs": [result]}, indent=1))
    print(json.dumps(result, indent=1))
    return 0


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    at = [int(q * (len(values) - 1)) for q in (0.9, 0.99)]
    return {"p50": statistics.median(values), "p90": values[at[0]], "p99": values[at[1]]}


if __name__ == "__main__":
    sys.exit(main())
