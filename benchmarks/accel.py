"""What the accelerator study costs: `python -m benchmarks.accel`. Medians, CPU time; one process.

A stage cold (its products are mapped anew: every stage has a size of its own), the same stage asked for again, one
question of the scheduler to the latency model, and capacity searches over 1,000 requests by the real scheduler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from headway.perf.hardware.models import model
from headway.perf.latency.base import BatchLoad, load_s, one_chunk_s
from headway.serving.load.machine import machine
from headway_research.accelerator.machine import PRESETS, IterationWork, assumptions
from headway_research.accelerator.machine import machine as accelerator
from headway_research.accelerator.operators import OperatorSetting
from headway_research.accelerator.service_figures import KV_TOKENS, requests
from headway_research.accelerator.serving import AcceleratorLatency, ServiceLimits, at_rate, capacity, instance, sarathi
from headway_research.accelerator.stage import Mode, evaluate, simulate_stage

MODELS = ("llama-3.1-8b", "llama-3.1-70b")
ASKED = {"cold_us": 1000.0, "memoised_us": 20.0, "search_s": 10.0}
SCHEDULES: tuple[Mode, Mode] = ("packing", "prefetch")


def median_us(call: Callable[[int], object], rounds: int) -> float:
    """Of `rounds` calls, each given its number."""
    took = []
    for i in range(rounds):
        began = time.perf_counter()
        call(i)
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def stages(preset: str, name: str, rounds: int) -> dict[str, object]:
    """One stage of random size after another, and one again and again."""
    setting = OperatorSetting(model(name), accelerator("tpuv6e"), assumed=assumptions(preset))
    works = [
        IterationWork(
            prefill_tokens=128 + 13 * i % 2048, prefill_past=97 * i % 30_000, decodes=32, kv_tokens=65_536 + 64 * i
        )
        for i in range(rounds)
    ]
    cold = median_us(lambda i: evaluate(setting, works[i]), rounds)
    simulate_stage(setting, works[0])
    again = median_us(lambda i: simulate_stage(setting, works[0]), 10 * rounds)
    latency = AcceleratorLatency(setting, "prefetch")

    def ask(i: int) -> float:
        load = BatchLoad(32, 32, 65_536 + i)
        return load_s(latency, load.with_chunk(512, one_chunk_s(latency, 97 * i, 512), 97 * i))

    return {
        "preset": preset,
        "model": name,
        "cold_us": round(cold, 1),
        "memoised_us": round(again, 2),
        "model_us": round(median_us(ask, 10 * rounds), 2),
    }


def search(preset: str, name: str, data: str, schedule: Mode, count: int) -> dict[str, object]:
    """The highest rate within the paper's limits, to 2%."""
    setting = OperatorSetting(
        model(name), accelerator("tpuv6e" if "8b" in name else "tpuv7"), assumed=assumptions(preset)
    )
    drawn = requests(data, count, 0)
    limit_s = simulate_stage(setting, IterationWork(decodes=32, kv_tokens=32 * 4096)).decode_s
    began = time.process_time()
    spec = instance(setting, schedule, sarathi(512), KV_TOKENS)
    found = capacity(spec, lambda qps: at_rate(drawn, qps), ServiceLimits(tbt_s=limit_s))
    return {
        "preset": preset,
        "model": name,
        "requests": f"{count} {data}",
        "schedule": schedule,
        "search_s": round(time.process_time() - began, 2),
        "qps": round(found.qps, 3),
        "rates_tried": len(found.tried),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [stages(preset, name, arguments.rounds) for preset in PRESETS for name in MODELS]
    searches = [
        search(preset, name, data, schedule, arguments.requests)
        for preset in PRESETS
        for name in MODELS
        for data in ("arxiv", "sharegpt")
        for schedule in SCHEDULES
    ]
    if arguments.json:
        found = {"schema": "headway.benchmark.accel/1", "machine": machine(), "asked": ASKED}
        print(json.dumps({**found, "stages": rows, "searches": searches}, indent=1))
        return
    print(machine())
    print("asked: a stage cold within 1,000 µs, memoised within 20 µs; a search of 1,000 requests within 10 s")
    for row in rows:
        print(
            f"{row['preset']:>8} {row['model']:>14}: stage cold {row['cold_us']:>6} µs, memoised "
            f"{row['memoised_us']:>5} µs; latency model, an iteration {row['model_us']:>5} µs"
        )
    for row in searches:
        print(
            f"{row['preset']:>8} {row['model']:>14}: {row['requests']:>13}, {row['schedule']:>8}: {row['search_s']:>6} "
            f"s for {row['rates_tried']} rates, {row['qps']} requests a second"
        )


if __name__ == "__main__":
    main()
