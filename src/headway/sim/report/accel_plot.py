"""Pictures of `headway accel`: a layer's timeline with its buffer, a sweep with its front, throughput against gaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.sim.report.style import COLOURS, FAINT, INK, MARKERS, house_style, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LANES = ("HBM", "vector", "array")


def stage_figure(data: Mapping[str, Any]) -> Figure:
    """A steady layer packed, and packed with prefetch, on one scale: units, HBM (own traffic and KV ahead), buffer."""
    lines = data["timelines"]
    whole = max(slot["end_us"] for line in lines.values() for slot in line["slots"])
    bandwidth = data["setting"]["machine"]["bandwidth"]
    with house_style():
        figure = new_figure(height_in=5.4)
        panels = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
        for axes, (mode, line) in zip(panels[:2], lines.items(), strict=True):
            for slot in line["slots"]:
                start = slot["start_us"]
                busy = max(slot["compute_us"], 0.004 * whole)
                lane = LANES.index(slot["unit"])
                axes.barh(lane, busy, left=start, height=0.7, color=COLOURS[0 if slot["unit"] == "array" else 2])
                if busy > 0.011 * len(slot["operator"]) * whole:
                    axes.text(start + 2, lane, slot["operator"], va="center", fontsize=8, color="white", clip_on=True)
                own = slot["own_mib"] * (1 << 20) / bandwidth * 1e6
                ahead = slot["prefetched_mib"] * (1 << 20) / bandwidth * 1e6
                axes.barh(0, own, left=start, height=0.7, color=FAINT)
                axes.barh(0, ahead, left=start + own, height=0.7, color=COLOURS[1])
            axes.set_yticks(range(len(LANES)), LANES)
            axes.set_title(f"{mode}: {line['layer_us']:.0f} µs a layer", fontsize=11)
            axes.grid(axis="y", visible=False)
        x, y = [0.0], [0.0]
        for slot in lines["prefetch"]["slots"]:
            x.append(slot["end_us"])
            y.append(slot["buffered_mib"])
        panels[2].fill_between(x, y, color=COLOURS[1], alpha=0.35, lw=0)
        panels[2].plot(x, y, color=COLOURS[1], lw=1.6)
        panels[2].set_ylabel("KV ahead, MiB")
        panels[2].set_xlabel("µs; grey: an operator's own HBM traffic, orange: KV fetched ahead")
        panels[2].set_xlim(0, whole * 1.01)
    return figure


def sweep_figure(data: Mapping[str, Any]) -> Figure:
    """Iteration with prefetch over the first axis, a line for each value of the others; rings mark the Pareto front."""
    first, *others = data["axes"]
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in data["rows"]:
        lines.setdefault(", ".join(f"{axis.split('.')[-1]} {row[axis]}" for axis in others), []).append(row)
    names = [str(value) for value in dict.fromkeys(row[first] for row in data["rows"])]
    numeric = all(isinstance(row[first], int | float) for row in data["rows"])
    with house_style():
        figure = new_figure(height_in=4.0)
        for axes, metric, label in zip(
            figure.subplots(1, 2), ("prefetch_ms", "prefetch_overall_speedup"), ("ms", "over serial"), strict=True
        ):
            for index, (name, rows) in enumerate(lines.items()):
                x = [row[first] if numeric else names.index(str(row[first])) for row in rows]
                y = [row[metric] for row in rows]
                colour = COLOURS[index % len(COLOURS)]
                marker = MARKERS[index % len(MARKERS)]
                axes.plot(x, y, label=name or None, color=colour, marker=marker, markersize=4, lw=1.6)
                front = [(a, b) for a, b, row in zip(x, y, rows, strict=True) if row["pareto"]]
                if front and metric == "prefetch_ms":
                    axes.scatter(*zip(*front, strict=True), s=90, facecolors="none", edgecolors=INK, lw=1.0, zorder=3)
            if not numeric:
                axes.set_xticks(range(len(names)), names)
            axes.set_xlabel(first)
            axes.set_ylabel(label)
            axes.set_title("iteration with prefetch" if metric == "prefetch_ms" else "overall speed-up", fontsize=11)
        if len(lines) > 1:
            axes.legend(fontsize=8)
    return figure


def capacity_figure(data: Mapping[str, Any]) -> Figure:
    """The percentile of gaps and of delays over the rate; dashed: the limits."""
    with house_style():
        figure = new_figure(height_in=3.8)
        for axes, key, scale, label in zip(
            figure.subplots(1, 2), ("tbt_s", "delay_s"), (1e3, 1.0), ("gap, ms", "delay, s"), strict=True
        ):
            for index, (mode, found) in enumerate(data["modes"].items()):
                x = [rate["qps"] for rate in found["tried"]]
                y = [rate[key] * scale for rate in found["tried"]]
                axes.plot(x, y, label=mode, color=COLOURS[index], marker=MARKERS[index], markersize=4, lw=1.6)
            axes.axhline(data["limits"][key] * scale, color=FAINT, ls="--", lw=1.2)
            axes.set_xlabel("requests a second")
            axes.set_ylabel(f"P{data['limits']['percentile']:g} {label}")
            if key == "delay_s":
                axes.set_yscale("log")
        axes.legend(fontsize=9)
    return figure
