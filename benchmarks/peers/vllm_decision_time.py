"""How long does Headway's part of a step take inside vLLM's scheduler? With decodes running and long prompts waiting.

.venv-vllm/bin/python benchmarks/peers/vllm_decision_time.py --running 256 --waiting 64
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.vllm.contract.virtual_engine import VirtualEngine, model_config
from vllm.config import ModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description="Decision time of Headway inside vLLM.")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=20_000, help="tokens of each waiting prompt")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=10_000, help="of the KV pool: how many prompts may be half done")
    a = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        model = model_config(Path(folder))
        engine = prepared(model, a)
        for phase in ("first steps", "later"):
            engine.scheduler.headway_stats.decision_s.clear()
            for _ in range(a.steps):
                engine.step()
            times = sorted(engine.scheduler.headway_stats.decision_s)
            quantiles = ", ".join(f"P{q} {1e6 * times[int(len(times) * q / 100)]:.0f} us" for q in (50, 90, 99))
            waiting = len(engine.scheduler.waiting)
            errors = engine.scheduler.headway_errors
            print(f"{phase}: {len(times)} decisions, {quantiles}; {waiting} wait, {errors} errors")
        first, again = repeated(prepared(model, a), a.steps)
        print(f"first steps, before schedule(): P50 {first:.0f} us; once more, from warm caches: P50 {again:.0f} us")


def prepared(model: ModelConfig, a: argparse.Namespace) -> VirtualEngine:
    """Return an engine in which requests decode, and long prompts have just come."""
    engine = VirtualEngine(model, blocks=a.blocks, max_num_seqs=a.running + 64, batched_tokens=8192)
    # Time of this thread on a processor: what else runs on the machine does not count.
    engine.scheduler.headway_stopwatch = time.thread_time
    for i in range(a.running):
        engine.add(f"decode{i}", 50, 20_000)
    while len(engine.first_token) < a.running:
        engine.step()
    for i in range(a.waiting):
        engine.add(f"long{i}", a.prompt, 1)
    return engine


def repeated(engine: VirtualEngine, steps: int) -> tuple[float, float]:
    """Decide twice before each step. Return the medians of the first and the second time, microseconds.

    vLLM's own scheduler has read megabytes before the first, which finds little of its own in the caches."""
    decide = engine.scheduler._decide
    times: list[tuple[float, float]] = []

    def twice(now: float) -> bool:
        started = time.thread_time()
        decide(now)
        between = time.thread_time()
        decided: bool = decide(now)
        times.append((between - started, time.thread_time() - between))
        return decided

    engine.scheduler._decide = twice
    for _ in range(steps):
        engine.step()
    return 1e6 * statistics.median(first for first, _ in times), 1e6 * statistics.median(again for _, again in times)


if __name__ == "__main__":
    main()
