"""Layouts on this machine: a long prefill in one process and in two pipeline stages, and how far the stages overlap.

    python -m benchmarks.parallel --model out/reference --tokens 32768 --schedules stream microbatch

One process computes with as many threads as there are cores, each of two stages with half of them. Static chunks of
512 tokens, so that all layouts do the same work. The share of overlap is the time in which both stages compute, of the
time from the first chunk's start to the last one's end, by the stages' own clocks. What is lost is told apart: filling
(the first chunk in the first stage alone), draining (the last chunk in the last stage alone), and waits of either stage
in between.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.numerics import settle
from headway.serving.load.machine import machine
from headway.sim.replay import read_log
from headway.sim.report.live_trace import LiveTimeline, timeline

LAYOUTS = {"one process": (1, 1), "S2": (1, 2), "T2": (2, 1)}


class WallClock:
    def now(self) -> float:
        return time.monotonic()


def prefill(model: str, tp: int, stages: int, tokens: int, chunking: str, schedule: str) -> dict[str, Any]:
    """Seconds to the first token of one prompt, and what the stages' timelines say."""
    from headway.core.sampling import SamplingParams
    from headway.runtime.build.engine import assemble
    from headway.runtime.engine.protocol import SubmitRequest

    with tempfile.TemporaryDirectory() as folder:
        log = f"{folder}/events.jsonl"
        config = EngineConfig(
            model=model,
            max_model_len=max(tokens + 64, 4096),
            threads=max(1, len(os.sched_getaffinity(0)) // (tp * stages)),
            tensor_parallel_size=tp,
            pipeline_parallel_size=stages,
            pipeline_schedule=schedule,  # type: ignore[arg-type]
            scheduler={"chunking": chunking},
            latency_profile="quick",
            event_log=log,
        )
        core = assemble(config, WallClock())
        poller = zmq.Poller()
        for one in core.executor.waits_on:
            poller.register(one, zmq.POLLIN)
        seconds = {}
        for name, length, count in (("warm", 2048, 4), ("long", tokens, 2)):
            prompt = np.random.default_rng(0).integers(5, 4000, length).astype(np.int32)
            submit = SubmitRequest(
                id=name,
                prompt_tokens=length,
                params=SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
                received_s=time.monotonic(),
            )
            begun = time.perf_counter()
            assert core.submit(submit, memoryview(prompt.tobytes())) is None
            first = 0.0
            while not core.idle:
                if core.executor.waits_on:
                    core.step(0.0)
                    if not core.idle:
                        poller.poll(500)
                    deltas = core.step(0.0)
                else:
                    deltas = core.step()
                if deltas and not first:
                    first = time.perf_counter() - begun
            seconds[name] = first
        core.executor.close()
        told = overlap(timeline(read_log(Path(log)))) if stages > 1 else {}
        return {"seconds": seconds["long"], **told}


def overlap(told: LiveTimeline) -> dict[str, Any]:
    """Shares of the long prefill's time: all stages compute, the pipeline fills, it drains, each stage waits between
    chunks; and the median wait of the first stage between two chunks, in seconds."""
    own = [one for one in told.slices if any(name == "long" for name, _, _ in one.chunks)]
    spans = [sorted((one.start_s, one.end_s) for one in own if one.stage == stage) for stage in (0, own[-1].stage)]
    begin, end = spans[0][0][0], spans[1][-1][1]
    waits = [[after[0] - before[1] for before, after in pairwise(stage)] for stage in spans]
    return {
        "overlap": told.both_share("long"),
        "fill": (spans[1][0][0] - begin) / (end - begin),
        "drain": (end - spans[0][-1][1]) / (end - begin),
        "waits": [sum(stage) / (end - begin) for stage in waits],
        "first_wait_s": statistics.median(waits[0]),
    }


def words(run: dict[str, Any]) -> str:
    if "overlap" not in run:
        return ""
    first, last = run["waits"]
    return (
        f", all stages compute {run['overlap']:.0%} of the time (filling {run['fill']:.1%}, draining "
        f"{run['drain']:.1%}, waits of the first stage {first:.1%}, of the last {last:.1%}; the first waits "
        f"{run['first_wait_s'] * 1e3:.1f} ms for its next chunk)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="A long prefill in several layouts.")
    parser.add_argument("--model", default="out/reference")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunking", default="static:512")
    parser.add_argument("--schedules", nargs="*", default=["stream"], choices=("stream", "microbatch"))
    parser.add_argument("--layouts", nargs="*", default=["one process", "S2"], choices=sorted(LAYOUTS))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    settle()
    if not Path(a.model).is_dir():
        subprocess.run([sys.executable, "scripts/make_checkpoint.py", "--out", a.model], check=True)
    results: dict[str, Any] = {}
    for name in a.layouts:
        for schedule in a.schedules if LAYOUTS[name][1] > 1 else ["stream"]:
            runs = [prefill(a.model, *LAYOUTS[name], a.tokens, a.chunking, schedule) for _ in range(a.repeat)]
            run = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
            key = f"{name}, {schedule}" if LAYOUTS[name][1] > 1 else name
            results[key] = run
            print(f"{key:16} {a.tokens} tokens, {a.chunking}: first token after {run['seconds']:.2f} s{words(run)}")
    if "one process" in results:
        for key, result in results.items():
            if key != "one process":
                print(f"{key} / one process: {result['seconds'] / results['one process']['seconds']:.2f}")
    if a.json:
        report = {
            "schema": "headway.parallel-bench/2",
            "machine": machine(),
            "model": Path(a.model).name,
            "tokens": a.tokens,
            "chunking": a.chunking,
            "results": results,
        }
        a.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
