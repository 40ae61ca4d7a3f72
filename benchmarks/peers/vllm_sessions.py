"""Agent sessions and a slice of Mooncake's conversations in vLLM, stock and with Headway inside, in virtual time.

    .venv-vllm/bin/python benchmarks/peers/vllm_sessions.py --traces ../shared/data/traces

vLLM's real scheduler, prefix cache and block pool (asynchronous scheduling, prefix caching on) around a model runner
whose steps take what the roofline of an 8B model on an H100 says; every run has the same requests. Prompts are cut to
`--most-tokens` and answers to `--most-output`, since the tokens are really hashed. Sessions are closed: a turn comes
its think time after the answer before it, and begins with the tokens that the trace says were cached; chats of 200/64
come beside them. Goodput counts the requests whose TTFT is within the larger of 1 s and five times what the prompt
takes alone, uncached, and whose tokens come 60 ms apart in the mean or less.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.vllm.contract.virtual_engine import VirtualEngine, model_config

from headway.perf.hardware import ModelShape
from headway.perf.latency.base import LatencyModel, decode_load, load_s, one_chunk_s
from headway.perf.latency.prefill_cache import PrefillCache
from headway.perf.latency.table import MachineRates, TableLatency, TableSource, roofline, save
from headway.sim.workload import TraceRequest
from headway.sim.workload.generate import PoissonArrivals
from headway.sim.workload.traces import read_trace, with_session_texts
from headway.sim.workload.transforms import clip_lengths, close_sessions, rescale_to_rate, spread_batches

SHAPE = ModelShape(layers=32, hidden=4096, q_heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256)
RATES = MachineRates(
    linear_flops=6e14, attention_flops=5e14, bandwidth=2.8e12, fixed_s=1e-3, per_decode_s=2e-8, name="H100-like"
)
ANSWER_TOKEN = 100
"""What the made-up model runner samples."""
LEAST_TTFT_S, TTFT_FACTOR, TPOT_S = 1.0, 5.0, 0.06


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with the traces (shared data)")
    parser.add_argument("--runs", default="default,2048,512,headway", help="stock, thresholds, the plug-in")
    parser.add_argument("--conversations", type=int, default=300, help="requests of Mooncake's trace")
    parser.add_argument("--qps", type=float, default=1.2, help="their rate")
    parser.add_argument("--sessions", type=int, default=60, help="agent sessions")
    parser.add_argument("--session-rate", type=float, default=1.0, help="sessions that begin, a second")
    parser.add_argument("--turns", type=int, default=15, help="requests of each session, the first")
    parser.add_argument("--chats", type=int, default=150, help="beside the sessions, one a second")
    parser.add_argument("--most-tokens", type=int, default=28_000)
    parser.add_argument("--most-output", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=28_000, help="of 16 tokens: the KV that an H100 has beside 8B")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workloads", default="conversations,agents")
    a = parser.parse_args()
    logging.disable(logging.INFO)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = as_table(roofline(SHAPE, RATES))
        profile = Path(folder) / "profile.json"
        save(source, profile)
        model = model_config(Path(folder))
        for name in a.workloads.split(","):
            requests = {"conversations": conversations, "agents": agents}[name](a)
            print(f"{name}: {len(requests)} requests, {sum(r.prompt_tokens for r in requests):,} prompt tokens")
            for run in a.runs.split(","):
                settings = {"profile": str(profile)} if run == "headway" else None
                engine = TracedEngine(
                    model, TableLatency(source), requests, stock=run != "headway", settings=settings,
                    asynchronous=True, blocks=a.blocks, batched_tokens=8192, max_num_seqs=256,
                    threshold=int(run) if run.isdigit() else 0,
                )  # fmt: skip
                engine.play()
                results[f"{name} {run}"] = shown = engine.summary()
                print(f"  {run:>8}: {json.dumps(shown)}", flush=True)
    if a.json is not None:
        a.json.write_text(json.dumps(results, indent=1))


def as_table(model: LatencyModel) -> TableSource:
    """Return a model's times as a profile, from which the plug-in starts and by which steps take their time."""
    sizes = sorted({1, 2, 4, *(int(8 * 1.2**i) for i in range(42)), 16_384})
    at = 16_384
    attention = [
        (c, one_chunk_s(model, 0, c), (one_chunk_s(model, at, c) - one_chunk_s(model, 0, c)) / at) for c in sizes
    ]
    none, one, more = model.decode_s(1, 0), model.decode_s(2, 0), model.decode_s(1, 1_000_000)
    return TableSource(
        fingerprint="8B on an H100", provenance="roofline", tokens=tuple((r, model.rows_s(r)) for r in [0, *sizes]),
        chunks=tuple(attention), decode=(2 * none - one, one - none, (more - none) / 1e6),
    )  # fmt: skip


def conversations(a: argparse.Namespace) -> list[TraceRequest]:
    """Return the first conversations of Mooncake's trace, shortened, at the given rate."""
    trace = read_trace(a.traces / "mooncake-conversation" / "conversation_0-2400s.jsonl.gz")
    first = spread_batches(trace.requests[: a.conversations], np.random.default_rng(1))
    clipped = clip_lengths(rescale_to_rate(first, a.qps), a.most_tokens, a.most_output)
    return [replace(r, klass="long" if r.prompt_tokens > 8192 else "short") for r in clipped]


def agents(a: argparse.Namespace) -> list[TraceRequest]:
    """Return closed agent sessions, shortened, and chats beside them."""
    trace = read_trace(a.traces / "claude-code-weka" / "requests.csv.gz")
    texts = with_session_texts(trace.requests)
    # Subagents begin hours later in some sessions: the session's first thread only.
    first = {r.session: r.thread for r in reversed(texts)}
    fitting = [r for r in texts if r.prompt_tokens <= a.most_tokens and r.thread == first[r.session]]
    rng = np.random.default_rng(2)
    turns = close_sessions(
        clip_lengths(fitting, None, a.most_output),
        PoissonArrivals(a.session_rate),
        rng,
        count=a.sessions,
        turns=a.turns,
        think=0.2,
        max_think_s=10.0,
    )
    chats = [TraceRequest(float(at), 200, 64, klass="chat") for at in PoissonArrivals(1.0).times(rng, a.chats)]
    return sorted([*(replace(r, klass="turn") for r in turns), *chats], key=lambda r: r.arrival_s)


def tokens_of(request: TraceRequest, number: int) -> list[int]:
    """Return token ids: equal exactly where the trace says that two prompts are equal."""
    tokens: list[int] = []
    text = request.text.cut(request.prompt_tokens) if request.text is not None else None
    pieces = [] if text is None else [(end, piece) for end, piece in text.pieces]
    if not pieces or pieces[-1][0] < request.prompt_tokens:
        pieces.append((request.prompt_tokens, -1 - number))
    for end, piece in pieces:
        of_answer = request.klass == "turn" and piece % 2 == 1 and piece > 0
        chance = Random(piece)
        start, step = chance.randrange(499), chance.randrange(1, 499)
        first = len(tokens)
        tokens += [ANSWER_TOKEN if of_answer else (start + step * i) % 499 for i in range(first, end)]
    return tokens


class TracedEngine(VirtualEngine):
    """vLLM's classes under one workload, each step of which takes what `latency` predicts."""

    def __init__(self, model: Any, latency: LatencyModel, requests: list[TraceRequest], **more: Any) -> None:
        super().__init__(model, **more)
        self.now = 0.0
        self.latency = latency
        self.requests = requests
        self.alone = PrefillCache(latency, 0.1)
        self.gaps: dict[str, list[float]] = {}
        self._last: dict[str, float] = {}
        self._seconds: dict[int, float] = {}
        schedule = self.scheduler.schedule

        def noted(*args: Any) -> Any:
            output = schedule(*args)
            self._seconds[id(output)] = self._predicted_s(output)
            return output

        self.scheduler.schedule = noted

    def play(self) -> None:
        """Run the workload to its end."""
        following: dict[tuple[str | None, str], list[int]] = {}
        due: list[tuple[float, int]] = []
        for number, request in enumerate(self.requests):
            if request.waits:
                following.setdefault((request.session, request.thread), []).append(number)
            else:
                heapq.heappush(due, (request.arrival_s, number))
        seen = 0
        while True:
            while due and due[0][0] <= self.now:
                self._arrives(*heapq.heappop(due))
            if not self.step():
                if not due:
                    return
                self.now = max(self.now, due[0][0])
            for name in list(self.finished)[seen:]:
                ended = self.requests[int(name)]
                waiting = following.get((ended.session, ended.thread), ())
                if waiting:
                    number = waiting.pop(0)
                    heapq.heappush(due, (self.finished[name] + (self.requests[number].think_s or 0.0), number))
            seen = len(self.finished)

    def _arrives(self, at_s: float, number: int) -> None:
        # It came while the last step was computed.
        now, self.now = self.now, at_s
        request = self.requests[number]
        self.add(str(number), tokens_of(request, number), request.output_tokens)
        self.now = now

    def _predicted_s(self, output: Any) -> float:
        chunks, decodes = [], []
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            past = request.num_computed_tokens - tokens
            if tokens == 1 and past >= request.num_prompt_tokens:
                decodes.append(past)
            else:
                chunks.append((past, tokens))
        load = decode_load(self.latency, len(decodes), sum(decodes))
        for past, tokens in chunks:
            load = load.with_chunk(tokens, one_chunk_s(self.latency, past, tokens), past)
        return load_s(self.latency, load)

    def _cost_s(self, output: Any) -> float:
        seconds = self._seconds.pop(id(output))
        return seconds if output.total_num_scheduled_tokens else 1e-3

    def on_token(self, name: str, count: int) -> None:
        if name in self._last:
            self.gaps.setdefault(name, []).append(self.now - self._last[name])
        self._last[name] = self.now

    def gaps_of(self, names: Iterable[str]) -> list[float]:
        """Return all gaps between tokens of these requests, seconds."""
        return [gap for name in names for gap in self.gaps.get(name, ())] or [0.0]

    def summary(self) -> dict[str, Any]:
        """Return latencies by class in seconds, goodput, and the share of prompt tokens that was computed."""
        shown: dict[str, Any] = {}
        good = 0
        for klass in sorted({r.klass for r in self.requests}):
            names = [str(n) for n, r in enumerate(self.requests) if r.klass == klass]
            ttft = np.array([self.ttft_s(name) for name in names])
            gaps = self.gaps_of(names)
            shown[klass] = {
                "ttft": [round(float(np.percentile(ttft, q)), 3) for q in (50, 99)],
                "tbt": [round(float(np.percentile(gaps, q)), 4) for q in (50, 99)],
            }
            good += sum(self._is_good(name) for name in names)
        span_s = max(self.finished.values()) - min(self.arrived.values())
        shown["goodput_per_s"] = round(good / span_s, 3)
        shown["good_share"] = round(good / len(self.requests), 3)
        shown["span_s"] = round(span_s, 1)
        prompts = sum(r.prompt_tokens for r in self.requests)
        shown["computed_share"] = round(self.tokens_computed / prompts, 3)
        shown["errors"] = getattr(self.scheduler, "headway_errors", 0)
        return shown

    def _is_good(self, name: str) -> bool:
        request = self.requests[int(name)]
        within_s = max(LEAST_TTFT_S, TTFT_FACTOR * self.alone.total_s(request.prompt_tokens))
        after_first = max(request.output_tokens - 1, 1)
        tpot_s = (self.finished[name] - self.first_token[name]) / after_first
        return self.ttft_s(name) <= within_s and tpot_s <= TPOT_S


if __name__ == "__main__":
    main()
