"""Agent sessions with and without the prefix cache: `nice python -m benchmarks.agent_sessions --most-tokens 24000`.

Sessions of the claude-code-weka trace (shared data) whose longest prompt is within the limit, at their full prompt
lengths and with short answers, one after another on the embedded model, with chats beside them. A turn's prompt begins
with as much of the turn before, its answer included, as the trace says was cached. Each turn is served by an engine
with the cache, then by one without. Prints per-turn times to first token, prompt tokens computed, the chats' times, and
how many answers are equal. With `--record FILE --begin-within 150` it is done in several runs. Float32. Prompts are
source code (`embedded.passkey`); with `--random-ids` they are random, and logits tie now and then: where an answer
differs, the gap between the best two tokens at the first difference is printed, which rounding must explain (chunks end
at other places). Such a prompt is then served without a cache in chunks of other sizes: rounding alone must give the
cached answer for some size.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from headway.core.request import SamplingParams
from headway.runtime.assembly.engine import assemble
from headway.runtime.embedded import model_path
from headway.runtime.embedded.passkey import make_document
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import SubmitRequest

SHARED = Path(os.environ.get("HEADWAY_SHARED", Path(__file__).resolve().parents[2] / "shared"))
TRACE = SHARED / "data" / "traces" / "claude-code-weka" / "requests.csv.gz"
ANSWER = 8
CHAT_TOKENS = 128
CHAT_EVERY_S = 0.1
ROUNDING = 2e-3
"""Gap in log-probability that float32 explains, over prompts of this length."""
CHUNKS = (64, 96, 128, 192, 256, 320, 512, 768, 1000, 1536)
"""Most tokens of an iteration, for prompts whose answers differ."""


class Turn(NamedTuple):
    """One request of a session, in tokens."""

    prompt: int
    cached: int
    """The part that is the turn before's."""


class WallClock:
    """`ClockProtocol` on this host's monotonic clock."""

    def now(self) -> float:
        """See `ClockProtocol`."""
        return time.monotonic()


def read_sessions(most_tokens: int, count: int) -> list[list[Turn]]:
    """Return the sessions of at least 4 turns that fit, shortest first. A subagent's turns are a session."""
    found: dict[tuple[str, str], list[Turn]] = defaultdict(list)
    with gzip.open(TRACE, "rt") as lines:
        for row in csv.DictReader(lines):
            turn = Turn(int(row["input_tokens"]), int(row["cached_prefix_tokens"]))
            found[row["conv"], row["agent"]].append(turn)
    fitting = [turns for turns in found.values() if len(turns) > 3 and max(t.prompt for t in turns) <= most_tokens]
    return sorted(fitting, key=lambda turns: sum(turn.prompt for turn in turns))[:count]


class Server:
    """An engine of the embedded model, and the times and answers of what it served."""

    def __init__(self, kv_tokens: int, cached: bool, chunk: int | None = None) -> None:
        """`chunk`: most tokens of an iteration; None: the default."""
        config = EngineConfig(
            model=str(model_path()), dtype="float32", kv_cache_bytes=kv_tokens * 1024, prefix_cache=cached, threads=1,
            scheduler={} if chunk is None else {"max_num_batched_tokens": chunk},
        )  # fmt: skip
        self.core: EngineCore = assemble(config, WallClock())
        self.turns_s: list[float] = []
        self.chats_s: list[float] = []
        self.prompts: list[np.ndarray] = []
        self.answers: list[tuple[int, ...]] = []
        self.gaps: list[list[float]] = []
        self._sent = 0
        self._rng = np.random.default_rng(1)
        # Until the next chat: chats come at equal intervals of the time that this engine serves.
        self._chat_in_s = CHAT_EVERY_S / 2
        self._waiting: dict[str, float] = {}

    def submit(self, ids: np.ndarray, output: int, kind: str) -> str:
        """Submit a prompt and return its id."""
        self._sent += 1
        name, now = f"{kind}{self._sent}", time.monotonic()
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, logprobs=2)
        message = SubmitRequest(id=name, prompt_tokens=len(ids), params=params, received_s=now)
        refused = self.core.submit(message, memoryview(ids.astype(np.int32).tobytes()))
        assert refused is None, refused
        self._waiting[name] = now
        return name

    def ask(self, ids: np.ndarray) -> tuple[int, ...]:
        """Serve one turn, with chats beside it, and return its answer."""
        name, ended = self.submit(ids, ANSWER, "turn"), False
        answer: list[int] = []
        gaps: list[float] = []
        next_chat_s = time.monotonic() + self._chat_in_s
        while not ended:
            if time.monotonic() >= next_chat_s:
                self.submit(self._rng.integers(10, 2000, CHAT_TOKENS), ANSWER, "chat")
                next_chat_s += CHAT_EVERY_S
            for delta in self.core.step():
                if (began := self._waiting.pop(delta.id, None)) is not None:
                    (self.turns_s if delta.id == name else self.chats_s).append(time.monotonic() - began)
                if delta.id == name:
                    answer += delta.tokens
                    gaps += [each.top[0][1] - each.top[1][1] for each in delta.logprobs or ()]
                    ended = delta.finish is not None
        self._chat_in_s = next_chat_s - time.monotonic()
        self.prompts.append(ids)
        self.gaps.append(gaps)
        self.answers.append(tuple(answer))
        return tuple(answer)


def source_code(tokens: int, seed: int) -> np.ndarray:
    """Return at least so many token ids of source code."""
    tokenizer = Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    ids: list[int] = []
    while len(ids) < tokens:
        document = make_document(tokens, seed, lambda text: len(text) // 3)
        ids += tokenizer.encode(document.text, add_special_tokens=False).ids
    return np.array(ids, dtype=np.int64)


def differences(one: Server, other: Server) -> dict[int, float]:
    """Return, by number of each answer that differs, the gap between the best two tokens where it first does."""
    gaps = {}
    for i, (answer, against) in enumerate(zip(one.answers, other.answers, strict=True)):
        at = next((k for k, pair in enumerate(zip(answer, against, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            gaps[i] = max(one.gaps[i][at], other.gaps[i][at])
    return gaps


def by_chunks_alone(cached: Server, numbers: Iterable[int], kv_tokens: int) -> int:
    """Return how many of these answers of `cached` also come without a cache, for some size of the chunks."""
    open_numbers, found = set(numbers), 0
    for chunk in CHUNKS:
        if not open_numbers:
            break
        server = Server(kv_tokens, False, chunk)
        same = {i for i in sorted(open_numbers) if server.ask(cached.prompts[i]) == cached.answers[i]}
        open_numbers -= same
        found += len(same)
    return found


def play(session: list[Turn], seed: int, kv_tokens: int, random_ids: bool) -> dict[str, Any]:
    """Serve a session on both engines, turn by turn, and return times in seconds, tokens computed and differences."""
    cached, plain = Server(kv_tokens, True), Server(kv_tokens, False)
    rng, text = np.random.default_rng(seed), np.zeros(0, dtype=np.int64)
    code = np.zeros(0, dtype=np.int64) if random_ids else source_code(sum(turn.prompt for turn in session), seed)
    for turn in session:
        kept = text[: min(turn.cached, turn.prompt - 1)]
        new = turn.prompt - len(kept)
        added, code = (rng.integers(10, 2000, new), code) if random_ids else (code[:new], code[new:])
        ids = np.concatenate([kept, added])
        text = np.concatenate([ids, np.array(cached.ask(ids))])
        plain.ask(ids)
    gaps = differences(cached, plain)
    servers = {
        name: {
            "tokens": server.core.stats().prefill_tokens_total,
            "turns_s": server.turns_s,
            "chats_s": server.chats_s,
        }
        for name, server in (("with", cached), ("without", plain))
    }
    found = by_chunks_alone(cached, gaps, kv_tokens) if gaps else 0
    return {"seed": seed, "turns": len(session), "prompt_tokens": sum(turn.prompt for turn in session),
            "gaps": list(gaps.values()), "found": found, **servers}  # fmt: skip


def show(rows: list[dict[str, Any]]) -> int:
    """Print the table of all sessions. Returns 1 where answers differ by more than rounding."""
    turns = sum(row["turns"] for row in rows)
    print(f"{len(rows)} sessions, {turns} turns, {sum(row['prompt_tokens'] for row in rows):,} prompt tokens")
    print("          tokens computed   turn P50   turn P99   chat P50   chat P99  (first token, ms)   chats")
    computed = {}
    for name in ("with", "without"):
        computed[name] = sum(row[name]["tokens"] for row in rows)
        times = [np.concatenate([row[name][kind] for row in rows]) for kind in ("turns_s", "chats_s")]
        figures = (1e3 * value for each in times for value in np.percentile(each, (50, 99)))
        figures_text = " ".join(f"{value:>10.0f}" for value in figures)
        print(f"{name:<8} {computed[name]:>12,} {figures_text} {len(times[1]):>24}")
    gaps = [gap for row in rows for gap in row["gaps"]]
    print(f"{computed['without'] / computed['with']:.1f} times less prefill; ", end="")
    print(f"{turns - len(gaps)} of {turns} answers equal", end="")
    print(f", the others from a gap of {max(gaps):.1g} in log-probability on" if gaps else "")
    found = sum(row["found"] for row in rows)
    if gaps:
        print(f"{found} of these {len(gaps)} answers come without a cache too, from chunks of another size")
    return int(bool(gaps) and (max(gaps) > ROUNDING or found < len(gaps)))


def main() -> int:
    """Play what sessions are left, and print the table. Returns 1 where answers differ by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-tokens", type=int, default=24_000, help="longest prompt of a session")
    parser.add_argument("--sessions", type=int, default=10**6, help="most sessions")
    parser.add_argument("--kv-tokens", type=int, default=0, help="size of the KV pool; default: twice the longest")
    parser.add_argument("--random-ids", action="store_true", help="prompts of random tokens")
    parser.add_argument("--record", type=Path, help="append each session's figures here; sessions in it are not played")
    parser.add_argument("--begin-within", type=float, default=1e9, help="seconds after which no session begins")
    arguments = parser.parse_args()
    sessions = read_sessions(arguments.most_tokens, arguments.sessions)
    kv_tokens = arguments.kv_tokens or 2 * arguments.most_tokens + 8192
    record: Path | None = arguments.record
    rows = [json.loads(line) for line in record.read_text().splitlines()] if record and record.exists() else []
    done, until_s = {row["seed"] for row in rows}, time.monotonic() + arguments.begin_within
    for seed, session in enumerate(sessions):
        if seed in done or time.monotonic() > until_s:
            continue
        rows.append(play(session, seed, kv_tokens, arguments.random_ids))
        if record is not None:
            with record.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    return show(rows)


if __name__ == "__main__":
    raise SystemExit(main())
