"""Tables and pictures of `headway accel`: stages, sweeps, services, and the paper beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from headway.sim.report.page import ReportChart
from headway.sim.report.plots import COLOURS, FAINT, house_style, new_figure, save
from headway.sim.report.tables import tokens

BAR, WIDE_BAR = 16, 36
"""Columns of an operator's bar in a steady layer's timeline."""


def stage_report(data: Mapping[str, Any], wide: bool = False) -> RenderableType:
    """A sentence, times, a steady layer with its timeline, and how much is enough. wide: all columns of the layer."""
    figures, stage = data["figures"], data["stage"]
    times = _table("time", "ms", "decode, ms", "decode ×", "overall ×")
    prefill = figures["prefill_ms"]
    times.add_row("prefill alone (TTFT)", _n(prefill), "-", "-", "-")
    times.add_row("decodes alone (TBT)", _n(figures["decode_ms"]), _n(figures["decode_ms"]), "-", "-")
    times.add_row("serial", _n(figures["serial_ms"]), _n(figures["decode_ms"]), "1.00", "1.00")
    for mode, name in (("packing", "packed (TBT beside the chunk)"), ("prefetch", "packed, prefetch")):
        total = figures[f"{mode}_ms"]
        speed = figures[f"{mode}_decode_speedup"]
        times.add_row(name, _n(total), _n(total - prefill), _n(speed, 2), _n(figures[f"{mode}_overall_speedup"], 2))
    title = f"{tokens(stage['prefill_tokens'])} prefill tokens"
    title += f" over {tokens(stage['prefill_past'])} cached" if stage["prefill_past"] else ""
    title += f", {stage['decodes']} decodes over {tokens(stage['kv_tokens'])} KV tokens"
    on = data["setting"]["machine"]["name"]
    times.title = escape(f"{data['setting']['model']} on {on}: {title}")
    sentence = (
        f"{figures['prefetch_ms']:.1f} ms an iteration with prefetch, {figures['packing_ms']:.1f} ms packed without, "
        f"{figures['serial_ms']:.1f} ms serial"
    )
    return Group(sentence, times, _operators(data, wide), _enough(data))


def _operators(data: Mapping[str, Any], wide: bool) -> Table:
    more = ("MiB", "prefetched", "buffer", "on chip") if wide else ("prefetched",)
    table = _table(
        "operator", "µs", "compute", "HBM", *(("bound",) if wide else ()), *more, "when, mapping" if wide else "when"
    )
    size = WIDE_BAR if wide else BAR
    table.title = f"a steady layer with prefetch, {data['layer_us']:.1f} µs (first {data['first_layer_us']:.1f}, "
    table.title += f"LM head {data['head_us']:.1f})"
    slots = data["timelines"]["prefetch"]["slots"]
    whole = max((row["end_us"] for row in slots), default=1.0)
    for row in slots:
        start, length = int(row["start_us"] / whole * size), max(1, round(row["us"] / whole * size))
        bar = " " * min(start, size - 1) + ("█" if row["bound"] == "compute" else "░") * length
        names = ("hbm_mib", "prefetched_mib", "buffered_mib", "peak_mib") if wide else ("prefetched_mib",)
        table.add_row(
            row["operator"], *(_n(row[name], 1) for name in ("us", "compute_us", "hbm_us")),
            *([row["bound"]] if wide else []), *(_n(row[name], 1) for name in names),
            bar + (f"\n{escape(row['mapping'])}" if row["mapping"] and wide else ""),
        )  # fmt: skip
    return table


def _enough(data: Mapping[str, Any]) -> str:
    figures, machine = data["figures"], data["setting"]["machine"]
    has = machine["prefetch_bytes"] / (1 << 20)
    lines = [
        f"KV of a layer {figures['kv_layer_mib']:.1f} MiB, of which {figures['hidden_mib']:.1f} were on chip in time"
    ]
    if figures["smallest_buffer_mib"] is not None:
        lines.append(
            f"smallest buffer that hides all KV traffic: {figures['smallest_buffer_mib']:.1f} MiB ({has:g} there)"
        )
    else:
        lines.append(
            f"no buffer hides all KV traffic: HBM is idle for {figures['idle_window_mib']:.1f} MiB a layer; "
            f"beyond {figures['useful_buffer_mib']:.1f} MiB more buys nothing ({has:g} there)"
        )
    chunk = data["figures"]["smallest_chunk"]
    lines.append(f"smallest chunk beside which idle HBM brings all of it: {'none' if chunk is None else chunk} tokens")
    need = figures["packing_needs_gbps"]
    there = machine["bandwidth"] / 1e9
    lines.append(
        "packing alone: no bandwidth is enough to match"
        if need is None
        else f"packing alone would need {need:,.0f} GB/s of HBM to match ({need / there:.2f}× the {there:,.0f} there)"
    )
    room = "fit" if figures["fits"] else "DO NOT FIT"
    lines.append(f"weights and KV {room}: {figures['hbm_gb']:.1f} of {machine['capacity'] / 1e9:.1f} GB of HBM")
    return "\n".join(lines)


def sweep_report(data: Mapping[str, Any]) -> RenderableType:
    """The fastest point, and one row a point; `*` marks the Pareto front. Files have every figure."""
    columns = {"prefetch_ms": "prefetch, ms", "prefetch_decode_speedup": "decode ×",
               "prefetch_overall_speedup": "overall ×", "useful_buffer_mib": "buffer, MiB"}  # fmt: skip
    table = _table(*(axis.rpartition(".")[2].replace("_", " ") for axis in data["axes"]), *columns.values(), "front")
    for row in data["rows"]:
        cells = [str(row[axis]) for axis in data["axes"]]
        mark = ("*" if row["pareto"] else "") if row["fits"] else "no room"
        table.add_row(*cells, *(_n(row[name], 2) for name in columns), mark)
    best = min((row for row in data["rows"] if row["fits"]), key=lambda row: row["prefetch_ms"], default=None)
    if best is None:
        return Group("weights and KV fit at no point", table)
    at = ", ".join(f"{axis.rpartition('.')[2]} {best[axis]}" for axis in data["axes"])
    return Group(f"fastest with prefetch: {best['prefetch_ms']:.1f} ms an iteration, at {escape(at)}", table)


def serve_report(data: Mapping[str, Any], wide: bool = False) -> RenderableType:
    """One rate, both ways. wide: with the use of the machine."""
    gap = f"P{data['limits']['percentile']:g} gap, ms"
    use_of = ("tokens/s", "MFU", "MBU", "idle") if wide else ()
    table = _table("schedule", "QPS", gap, "delay, ms", "finished", "TTFT P50, ms", *use_of, "holds")
    for mode, run in data["runs"].items():
        rate, use, total = run["rate"], run["run"]["use"], run["run"]["total"]
        used = (_n(total.get("output_tokens_per_s"), 0), _n(use["mfu"], 3), _n(use["mbu"], 3), _n(use["idle_share"], 3))
        table.add_row(
            mode, _n(rate["qps"], 3), _n(rate["tbt_s"] * 1e3, 2), _n(rate["delay_s"] * 1e3, 0),
            f"{rate['finished']} of {rate['requests']}", _ms(total["ttft_s"]["p50"]),
            *(used if wide else ()), "yes" if rate["ok"] else "no",
        )  # fmt: skip
    held = [mode for mode, run in data["runs"].items() if run["rate"]["ok"]]
    rate = next(iter(data["runs"].values()))["rate"]["qps"]
    sentence = f"{rate:g} requests a second are served within the limits by {' and '.join(held) or 'neither schedule'}"
    return Group(sentence, table, _limits(data))


def capacity_report(data: Mapping[str, Any]) -> RenderableType:
    """The rates that were found."""
    table = _table("schedule", "QPS within the limits", "gap there, ms", "delay there, s", "rates tried")
    for mode, found in data["modes"].items():
        at = next((rate for rate in found["tried"] if rate["qps"] == found["qps"]), None)
        gap, delay = (None, None) if at is None else (at["tbt_s"] * 1e3, at["delay_s"])
        table.add_row(mode, _n(found["qps"], 3), _n(gap, 2), _n(delay, 3), str(len(found["tried"])))
    lines = [_limits(data)]
    if "packing_needs_bandwidth_times" in data:
        times = data["packing_needs_bandwidth_times"]
        lines.append(
            "packing alone serves as much with " + ("no" if times is None else f"{times:.2f}×") + " HBM bandwidth"
        )
    sentence = "within the limits: " + ", ".join(
        f"no rate by {mode}" if found["qps"] is None else f"{found['qps']:.2f} requests a second by {mode}"
        for mode, found in data["modes"].items()
    )
    sentence += "" if data["gain"] is None else f" ({data['gain']:.2f}×)"
    return Group(sentence, table, "\n".join(lines))


def _limits(data: Mapping[str, Any]) -> str:
    limits = data["limits"]
    return (
        f"limits at P{limits['percentile']:g}: gaps {limits['tbt_s'] * 1e3:.2f} ms, delay to the first schedule "
        f"{limits['delay_s']:g} s; KV for {data['kv_tokens']:,} tokens"
    )


def _table(first: str, *others: str) -> Table:
    table = Table(title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if name.startswith("when") else "right")
    return table


def _n(value: Any, digits: int = 3) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else escape(str(value))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else _n(seconds * 1e3, 0)


LANES = ("HBM", "vector", "array")


def draw_stage(data: Mapping[str, Any], file: Path) -> None:
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
                own = slot["hbm_us"]
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
    save(figure, file)


def sweep_charts(data: Mapping[str, Any]) -> list[ReportChart]:
    """Iteration with prefetch over the first axis, a line for each value of the others, and the Pareto front."""
    first, *others = data["axes"]
    numeric = all(isinstance(row[first], int | float) for row in data["rows"])

    def lines(metric: str) -> dict[str, list[tuple[Any, float]]]:
        found: dict[str, list[tuple[Any, float]]] = {}
        for row in data["rows"]:
            name = ", ".join(f"{axis.split('.')[-1]} {row[axis]}" for axis in others)
            point = row[first] if numeric else str(row[first]), row[metric]
            found.setdefault(name or "all", []).append(point)
            if row["pareto"] and metric == "prefetch_ms":
                found.setdefault(f"{name} front".strip(), []).append(point)
        return found

    return [
        ReportChart(title="iteration with prefetch", x=first, y="ms", lines=lines("prefetch_ms")),
        ReportChart(title="overall speed-up", x=first, y="over serial", lines=lines("prefetch_overall_speedup")),
    ]


def capacity_charts(data: Mapping[str, Any]) -> list[ReportChart]:
    """The percentile of gaps and of delays over the rate, and the limits."""
    modes, limits = data["modes"], data["limits"]
    tried = [rate["qps"] for found in modes.values() for rate in found["tried"]]

    def lines(key: str, scale: float) -> dict[str, list[tuple[float, float]]]:
        limit = [(at, limits[key] * scale) for at in (min(tried), max(tried))]
        return {m: [(r["qps"], r[key] * scale) for r in found["tried"]] for m, found in modes.items()} | {
            "limit": limit
        }

    title, x = f"P{limits['percentile']:g}", "requests a second"
    return [
        ReportChart(title=f"{title} of gaps", x=x, y="ms", lines=lines("tbt_s", 1e3)),
        ReportChart(title=f"{title} of delays", x=x, y="s", lines=lines("delay_s", 1.0), log_y=True),
    ]
