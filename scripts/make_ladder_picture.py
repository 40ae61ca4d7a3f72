"""Draw docs/figures/ladder.png: a minute of the ladder, in virtual time: `python scripts/make_ladder_picture.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headway.perf.hardware import ParallelLayout, accelerator, model
from headway.perf.latency.fitted import fitted
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.loop import simulate
from headway.sim.report.plots import COLOURS, DECODE, INK, house_style, new_figure, save
from headway.sim.report.tables import tokens
from headway.sim.spec import InstanceSpec, RunSpec
from headway.sim.workload import TraceRequest

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
    spec = InstanceSpec(config=SchedulerConfig(), latency=latency, kv_tokens=440_000)
    result = simulate(spec, workload(), RunSpec(keep_iterations=True))
    shown = [r for r in result.records if r.arrival_s < UNTIL_S and r.token_s[0] > FROM_S]
    places = {record.id: place for place, record in enumerate(shown)}
    with house_style():
        figure = new_figure(height_in=0.1 * len(shown) + 1.4)
        axes = figure.subplots()
        for record in shown:
            axes.plot([record.arrival_s, record.token_s[0]], [places[record.id]] * 2, color=DECODE, linewidth=3.5)
        for one in result.iterations:
            for name, _, _ in one.chunks:
                if name in places:
                    span = [one.stages[0][0], one.done_s]
                    axes.plot(span, [places[name]] * 2, color=COLOURS[0], linewidth=3.5, solid_capstyle="butt")
        axes.set_xlim(FROM_S, UNTIL_S)
        marked = shown[::4]
        axes.set_yticks([places[r.id] for r in marked], [tokens(r.prompt_tokens) for r in marked], fontsize=10)
        axes.invert_yaxis()
        axes.set_xlabel("seconds")
        axes.set_ylabel("prompts in order of arrival, tokens")
        axes.set_title("Short prompts pass long ones, which climb as they wait", fontweight="bold")
        place = {"transform": axes.transAxes, "fontweight": "bold"}
        axes.text(0.03, 0.12, "computed", color=COLOURS[0], **place)
        axes.text(0.03, 0.06, "waits", color=INK, alpha=0.6, **place)
    save(figure, OUT)


if __name__ == "__main__":
    main()
