"""Layouts on this machine: a long prefill in one process and in two pipeline stages, and how far the stages overlap.

    python -m benchmarks.parallel --model out/reference --tokens 32768

One process computes with as many threads as there are cores, each of two stages with half of them. Static chunks of
512 tokens, so that all layouts do the same work. The share of overlap is the time in which both stages compute, of the
time from the first chunk's start to the last one's end, by the stages' own clocks.
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
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from headway.engine.config import EngineConfig
from headway.engine.numerics import settle
from headway.report.live_trace import timeline
from headway.simulator.replay import read_log

LAYOUTS = {"one process": (1, 1), "S2": (1, 2), "T2": (2, 1)}


class WallClock:
    def now(self) -> float:
        return time.monotonic()


def prefill(model: str, tp: int, stages: int, tokens: int, chunking: str, schedule: str) -> dict[str, Any]:
    """Seconds to the first token of one prompt, and what the stages' timelines say."""
    from headway.cli.assemble import assemble
    from headway.core.sampling import SamplingParams
    from headway.engine.protocol import Submit

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
            submit = Submit(
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
        share = timeline(read_log(Path(log))).both_share("long") if stages > 1 else None
        return {"seconds": seconds["long"], "overlap": share}


def main() -> int:
    parser = argparse.ArgumentParser(description="A long prefill in several layouts.")
    parser.add_argument("--model", default="out/reference")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunking", default="static:512")
    parser.add_argument("--schedule", default="stream", choices=("stream", "microbatch"))
    parser.add_argument("--layouts", nargs="*", default=["one process", "S2"], choices=sorted(LAYOUTS))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    settle()
    if not Path(a.model).is_dir():
        subprocess.run([sys.executable, "scripts/make_checkpoint.py", "--out", a.model], check=True)
    results: dict[str, Any] = {}
    for name in a.layouts:
        runs = [prefill(a.model, *LAYOUTS[name], a.tokens, a.chunking, a.schedule) for _ in range(a.repeat)]
        seconds = statistics.median(run["seconds"] for run in runs)
        results[name] = {"seconds": seconds, "overlap": runs[-1]["overlap"]}
        words = "" if runs[-1]["overlap"] is None else f", both stages compute {runs[-1]['overlap']:.0%} of the time"
        print(f"{name:12} {a.tokens} tokens, {a.chunking}, {a.schedule}: first token after {seconds:.2f} s{words}")
    if "one process" in results:
        for name, result in results.items():
            if name != "one process":
                print(f"{name} / one process: {result['seconds'] / results['one process']['seconds']:.2f}")
    if a.json:
        a.json.write_text(json.dumps({"schema": "headway.parallel-bench/1", "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
