"""One live document of a million tokens, with chats beside it, in one process and over two KV groups.

    python -m benchmarks.million_tokens

The embedded model looks for the passkey in the document: attention that misses its digits, or positions that are off,
make the answer wrong. Chats of 100 tokens come one after the other, a second apart. `--tokens` makes it
shorter: the time grows with the square of the length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks.serving import first_token_s, metric, name_of
from headway.runtime.embedded import model_path
from headway.runtime.embedded.passkey import PasskeyDocument, make_document
from headway.serving.load.convoy import ServerProcess

OUTPUT = 8
LONGEST_S = 4 * 3600.0


class Answer(NamedTuple):
    text: str
    prompt_tokens: int
    seconds: float
    chats_s: list[float]
    """Time to first token of each chat beside it."""
    held: int
    """Most KV tokens in use at the same time."""


def ask(url: str, document: PasskeyDocument) -> Answer:
    """Send the document, and chats until its answer has come."""
    name, done = name_of(url), threading.Event()
    chats: list[float] = []
    held = [0]

    def chat() -> None:
        while not done.wait(1.0):
            chats.append(first_token_s(url, {"model": name, "prompt": list(range(100, 200)), "max_tokens": 4}))
            held[0] = max(held[0], int(metric(url, "headway_kv_tokens_used")))

    beside = threading.Thread(target=chat)
    beside.start()
    try:
        body = {"model": name, "prompt": document.prompt, "max_tokens": OUTPUT, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begun = time.perf_counter()
        with urllib.request.urlopen(request, timeout=LONGEST_S) as reply:
            found = json.load(reply)
        seconds = time.perf_counter() - begun
        return Answer(found["choices"][0]["text"].strip(), found["usage"]["prompt_tokens"], seconds, chats, held[0])
    finally:
        done.set()
        beside.join()


def main() -> int:
    parser = argparse.ArgumentParser(description="One document of a million tokens, with chats beside it.")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--kv-groups", type=int, nargs="+", default=[1, 2])
    a = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    document = make_document(a.tokens, 0, lambda text: len(tokenizer.encode(text).ids))
    wrong = 0
    for groups in a.kv_groups:
        flags = ["--dtype", a.dtype, "--max-model-len", "1048576", "--kv-parallel-size", str(groups)]
        with ServerProcess(flags) as server:
            answer = ask(server.url, document)
        chats = sorted(answer.chats_s)
        verdict = "right" if answer.text == document.passkey else f"WRONG: {answer.text!r}, not {document.passkey}"
        print(f"{groups} KV groups, {a.dtype}: {answer.prompt_tokens:,} tokens in {answer.seconds:.0f} s, "
              f"{answer.held:,} tokens of KV; {len(chats)} chats beside it: TTFT median "
              f"{statistics.median(chats) * 1e3:.0f}, P99 {chats[int(0.99 * (len(chats) - 1))] * 1e3:.0f} ms; "
              f"the answer is {verdict}", flush=True)  # fmt: skip
        wrong += answer.text != document.passkey
    return wrong


if __name__ == "__main__":
    sys.exit(main())
