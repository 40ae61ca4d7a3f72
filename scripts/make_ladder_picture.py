"""Draw docs/figures/ladder.png: a minute of the ladder, in virtual time: `python scripts/make_ladder_picture.py`."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

from headway.perf.hardware import ParallelLayout, accelerator, model
from headway.perf.latency.fitted import fitted
from headway.policy.iteration.config import SchedulerConfig
from headway.sim import InstanceSpec, simulate
from headway.sim.workload import TraceRequest

mpl.use("Agg")
from matplotlib import pyplot as plt

OUT = Path(__file__).resolve().parents[1] / "docs" / "figures" / "ladder.png"
FROM_S, UNTIL_S = 120.0, 180.0


def workload() -> list[TraceRequest]:
    """Return more prompts than can be in time: lengths of all sizes, at a load of about 1.2."""
    rng = np.random.default_rng(4)
    at = np.cumsum(rng.exponential(0.95, 220))
    prompts = rng.lognormal(8.6, 1.3, 220).clip(100, 100_000)
    return [
        TraceRequest(float(a), int(p), int(o)) for a, p, o in zip(at, prompts, rng.integers(20, 200, 220), strict=True)
    ]


def main() -> None:
    latency = fitted(accelerator("a100-80gb"), model("llama-3-8b"), ParallelLayout(tp=1, stages=1), 0)
    result = simulate(InstanceSpec(config=SchedulerConfig(), latency=latency, kv_tokens=440_000), workload())
    shown = [r for r in result.records if r.arrival_s < UNTIL_S and r.token_s[0] > FROM_S]
    places = {record.id: place for place, record in enumerate(shown)}
    figure, axes = plt.subplots(figsize=(9, 0.11 * len(shown) + 1.2))
    for record in shown:
        axes.plot([record.arrival_s, record.token_s[0]], [places[record.id]] * 2, color="#c9d3dc", linewidth=2.5)
    for one in result.iterations:
        for name, _, _ in one.chunks:
            if name in places:
                axes.plot([one.stages[0][0], one.done_s], [places[name]] * 2, color="#0072b2", linewidth=2.5)
    axes.set_xlim(FROM_S, UNTIL_S)
    axes.set_yticks([places[r.id] for r in shown[::3]], [f"{r.prompt_tokens:,}" for r in shown[::3]], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_ylabel("prompts in order of arrival, tokens")
    figure.tight_layout()
    figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
