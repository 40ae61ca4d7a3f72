"""Request bodies by cost: the longest gap of a stream beside each, and whether the server's memory comes back.

Run: python -m benchmarks.bodies [--bodies 60] [--seed 0] [--most-mb 60]. A server on the embedded model streams a chat
while bodies that a seed draws are sent one after another: many keys, lists, objects, strings, numbers, nesting, texts
of any script, token ids, in every field, whole and broken. It prints the bodies with the longest gaps beside them (ms),
how each was answered, the longest gaps of the same chat in a quarter of these times without bodies (`idle`), and the
server's resident memory before and after (MB). A client hangs up where an answer takes longer than 2 s. Prompts
that are computed beside the chat delay its tokens by the target that the server is given, 20 ms: the rest is due to
the bodies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path

from benchmarks.faults import Bystander, connection, model
from headway.serving.load.convoy import ServerProcess

SERVED = ("--max-model-len", "8192", "--t-target-ms", "20")
FIELDS = ("prompt", "messages", "stop", "logit_bias", "user", "stop_token_ids", "tokens", "input", "x", "slo")
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/contexts")
ITEMS = (
    b"[]", b"{}", b'""', b"1", b"1.5", b"null", b"1e999", b'"abc"', b'{"role":"user","content":"a"}',
    b'{"type":"text","text":"b"}', b"[1,2]", b'"\\ud83d"', b"1" * 400,
)  # fmt: skip
TEXTS = (
    "a",
    "word ",
    "\u0646\u0635 ",
    "\u0939\u0948",
    "\u0e19\u0e35",
    "\U0001f600",
    '{\\"a\\":1}',
    "\\u0041",
    "\\n",
    " ",
)


def body(dice: random.Random, most: int, path: str, name: str) -> tuple[str, bytes]:
    """Draw a body for a path and a model; return what it is in words, and its bytes."""
    size, field = int(most ** dice.uniform(0.7, 1.0)), dice.choice(FIELDS)
    kind = dice.choice(("array", "keys", "text", "deep", "ids", "top"))
    if kind == "array":
        item = dice.choice(ITEMS)
        value = b"[" + b",".join([item] * (size // (len(item) + 1))) + b"]"
        kind += f" of {item[:20].decode()}"
    elif kind in ("keys", "top"):
        value = b"{" + b",".join(b'"k%d":1' % number for number in range(size // 12)) + b"}"
    elif kind == "text":
        piece = dice.choice(TEXTS)
        value = b'"' + piece.encode() * (size // len(piece.encode())) + b'"'
        kind += f" of {piece!r}"
    elif kind == "deep":
        value = b"[" * (size // 2) + b"]" * (size // 2)
    else:
        value = b"[" + b",".join([b"%d" % dice.randrange(300)] * (size // 4)) + b"]"
    if kind == "top":
        whole = value
    else:
        # One token: the body is measured, not its answer.
        others = {"input": '"x"', "max_output_tokens": "1"} if path == "/v1/responses" else {"max_tokens": "1"}
        if path == "/v1/chat/completions":
            others["messages"] = '[{"role":"user","content":"x"}]'
        rest = "".join(f',"{key}":{given}' for key, given in others.items() if key != field)
        whole = f'{{"model":"{name}","{field}":'.encode() + value + rest.encode() + b"}"
    if dice.random() < 0.1:
        whole = whole[: dice.randrange(len(whole))]
    return f"{field}: {kind}, {len(whole) >> 10} KiB", whole


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-mb", type=int, default=60)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    sent = []
    with ServerProcess(SERVED) as server:
        name = model(server.url)
        with Bystander(server.url, name) as beside:
            time.sleep(3.0)
            before = resident_mb(server.pid)
            for _ in range(given.bodies):
                path = dice.choice(PATHS)
                what, content = body(dice, given.most_mb << 20, path, name)
                # To draw a body held this process, in which the chat is read.
                time.sleep(0.01)
                began = time.monotonic()
                one = connection(server.url, timeout=2.0)
                try:
                    one.request("POST", path, content)
                    response = one.getresponse()
                    answer: object = response.status
                    if path == "/v1/contexts" and response.status < 300:
                        # A document that is prepared goes on for long after its answer.
                        one.request("DELETE", f"{path}/{json.loads(response.read())['id']}")
                except OSError as error:
                    answer = error
                finally:
                    one.close()
                sent.append((began, time.monotonic(), f"{path} {what}: {answer}"))
            time.sleep(2.0)
            after = resident_mb(server.pid)
            waits = []
            for began, ended, _ in sent[::4]:
                waits.append(time.monotonic())
                time.sleep(ended - began)
            waits.append(time.monotonic())
    rows = [(beside.gap_ms(began, ended), ended - began, what) for began, ended, what in sent]
    idle = [beside.gap_ms(began, ended) for began, ended in itertools.pairwise(waits)]
    for gap, took, what in sorted(rows, reverse=True)[:15]:
        print(f"{gap:8.1f} {took:7.2f} s  {what}")
    for words, found in (
        (f"beside {len(rows)} bodies", [gap for gap, _, _ in rows]),
        ("idle, as long as every fourth of them", idle),
    ):
        gaps = sorted(gap for gap in found if gap == gap)
        print(f"largest gap {gaps[-1]:.1f} ms, median of the largest {gaps[len(gaps) // 2]:.1f} ms: {words}")
    print(f"resident memory: {before:.0f} MB before, {after:.0f} MB after ({after / before - 1.0:+.0%})")
    print("said by the chat beside them:", beside.failures[:3] or "nothing")


if __name__ == "__main__":
    main()
