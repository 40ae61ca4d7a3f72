"""How long one decision takes: `python -m benchmarks.scheduler_decision`. Medians of `schedule()` alone, CPU time.

2,048 requests decode; 64 (or 1,000) prefills wait or are half done; the ladder with adaptive chunks on a model like
Llama-3-8B on an H100. Beside it `complete()`, and both for a static chunk. A decision includes policy order,
packing, sizing of chunks, KV admission and the batch. `at once`: the prefills come together, and the first decisions
after that are counted; `kept up`: whenever one completes another comes, for 100 times as many decisions; then most of
what waits is long; `no KV`: the prefills come together and find no block free.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from headway.cli.doctor import is_compiled
from headway.core.batch import Batch
from headway.core.request import Request, Span
from headway.kv.block_manager import BlockManager
from headway.perf.hardware import ModelShape
from headway.perf.latency.table import MachineRates, roofline
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.scheduler import Scheduler
from headway.serving.load.prompts import machine

SHAPE = ModelShape(layers=32, hidden=4096, q_heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256)
RATES = MachineRates(
    linear_flops=6e14, attention_flops=5e14, bandwidth=2.8e12, fixed_s=1e-3, per_decode_s=2e-8, name="H100-like"
)


def prepared(
    decodes: int, waiting: int, policy: str, chunking: str, arrivals: str = "at once"
) -> tuple[Scheduler, float]:
    """A scheduler with so many decodes and waiting prefills; the time that it thinks it is."""
    config = SchedulerConfig(
        policy=policy, chunking=chunking, t_target_s=0.1, max_num_seqs=decodes + waiting, max_num_batched_tokens=16384
    )
    scheduler = Scheduler(config, roofline(SHAPE, RATES), BlockManager(64_000_000, 64))
    rng = random.Random(0)
    now = 0.0
    for i in range(decodes):
        request = Request(id=f"d{i}", arrival_s=now, prompt_tokens=rng.randint(16, 200), max_output_tokens=100_000)
        scheduler.add(Span.whole(request), now)
    while scheduler.running < decodes or any(True for _ in scheduler.policy.queue):
        now = iterate(scheduler, now)
    if arrivals == "no KV":
        pool = scheduler.block_manager
        pool.reserve("others", pool.free_blocks * pool.block_tokens)
    for i in range(waiting):
        scheduler.add(arrival(i, rng, 500, now), now)
        now += 1e-4
    return scheduler, now


def arrival(number: int, rng: random.Random, output: int, now: float) -> Span:
    """One prompt of 200 to 8,000 tokens; every eighth has 20,000 to 200,000."""
    length = rng.randint(20_000, 200_000) if number % 8 == 0 else rng.randint(200, 8000)
    return Span.whole(Request(id=f"w{number}", arrival_s=now, prompt_tokens=length, max_output_tokens=output))


def iterate(scheduler: Scheduler, now: float) -> float:
    batch = scheduler.schedule(now)
    assert batch is not None
    now += batch.predicted_s
    scheduler.complete(batch.id, [], now)
    return now


def measure(
    decodes: int, waiting: int, policy: str, chunking: str, rounds: int, arrivals: str = "at once"
) -> dict[str, object]:
    """Medians in microseconds. Unless arrivals are kept up, the world is made anew as it drains, or as decodes grow."""
    decide: list[float] = []
    complete: list[float] = []
    rng, arrived = random.Random(1), waiting
    decisions = {"kept up": rounds, "no KV": 64, "at once": max(16, waiting // 16)}[arrivals]
    while len(decide) < rounds:
        scheduler, now = prepared(decodes, waiting, policy, chunking, arrivals)
        for _ in range(decisions):
            while arrivals == "kept up" and len(scheduler.policy.queue) < waiting:
                # Short answers: completed prompts do not add up to more and more decodes.
                scheduler.add(arrival(arrived, rng, 20, now), now)
                arrived += 1
            started = time.perf_counter()
            batch: Batch | None = scheduler.schedule(now)
            middle = time.perf_counter()
            assert batch is not None
            now += batch.predicted_s
            again = time.perf_counter()
            scheduler.complete(batch.id, [], now)
            complete.append(time.perf_counter() - again)
            decide.append(middle - started)
    return {
        "decodes": decodes,
        "waiting": waiting,
        "policy": policy,
        "chunking": chunking,
        "arrivals": arrivals,
        "schedule_us": round(statistics.median(decide) * 1e6, 1),
        "schedule_p90_us": round(statistics.quantiles(decide, n=10)[-1] * 1e6, 1),
        "complete_us": round(statistics.median(complete) * 1e6, 1),
        "decisions": len(decide),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [
        measure(decodes, waiting, policy, chunking, arguments.rounds)
        for decodes, waiting in ((128, 64), (2048, 64), (2048, 1000))
        for policy, chunking in (("ladder", "adaptive"), ("fcfs", "static:4096"))
    ]
    rows.insert(3, measure(2048, 64, "ladder", "adaptive", 100 * arguments.rounds, "kept up"))
    rows += [measure(2048, waiting, "ladder", "adaptive", arguments.rounds, "no KV") for waiting in (64, 1000, 4096)]
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=1))
        return
    print(
        f"{machine()}, {'compiled' if is_compiled() else 'interpreted'}\n"
        "medians; schedule() ≤ 25 µs is asked at 2,048 + 64"
    )
    for row in rows:
        print(
            f"{row['decodes']:>5} decodes {row['waiting']:>5} waiting, {row['arrivals']}  "
            f"{row['policy']:>5}/{row['chunking']:<12} "
            f"schedule {row['schedule_us']:>6} µs (P90 {row['schedule_p90_us']:>6})  "
            f"complete {row['complete_us']:>6} µs"
        )


if __name__ == "__main__":
    main()
