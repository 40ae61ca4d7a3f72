"""Tables of `headway accel`: stages, sweeps, services, and the paper beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from headway.sim.report.units import tokens

BAR = 36


def stage_report(data: Mapping[str, Any]) -> RenderableType:
    """Times, a steady layer with its timeline, and how much is enough."""
    figures, stage = data["figures"], data["stage"]
    times = _table("time", "ms", "decode, ms", "decode speed-up", "overall speed-up")
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
    return Group(times, _operators(data), _enough(data))


def _operators(data: Mapping[str, Any]) -> Table:
    table = _table(
        "operator", "µs", "compute", "HBM", "bound", "MiB", "prefetched", "buffer", "on chip", "when, mapping"
    )
    table.title = f"a steady layer with prefetch, {data['layer_us']:.1f} µs (first {data['first_layer_us']:.1f}, "
    table.title += f"LM head {data['head_us']:.1f})"
    whole = max((row["start_us"] + row["us"] for row in data["operators"]), default=1.0)
    for row in data["operators"]:
        start, length = int(row["start_us"] / whole * BAR), max(1, round(row["us"] / whole * BAR))
        bar = " " * min(start, BAR - 1) + ("█" if row["bound"] == "compute" else "░") * length
        table.add_row(
            row["operator"], _n(row["us"], 1), _n(row["compute_us"], 1), _n(row["hbm_us"], 1), row["bound"],
            _n(row["hbm_mib"], 1), _n(row["prefetched_mib"], 1), _n(row["buffered_mib"], 1), _n(row["peak_mib"], 1),
            bar + (f"\n{escape(row['mapping'])}" if row["mapping"] else ""),
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
    """One row a point; `*` marks the Pareto front."""
    columns = ("packing_ms", "prefetch_ms", "prefetch_decode_speedup", "prefetch_overall_speedup",
               "useful_buffer_mib", "packing_needs_gbps", "fits")  # fmt: skip
    table = _table(*data["axes"], *(name.replace("_", " ") for name in columns), "front")
    for row in data["rows"]:
        cells = [str(row[axis]) for axis in data["axes"]]
        table.add_row(*cells, *(_n(row[name], 2) for name in columns), "*" if row["pareto"] else "")
    return table


def serve_report(data: Mapping[str, Any]) -> RenderableType:
    """One rate, both ways."""
    gap = f"P{data['limits']['percentile']:g} gap, ms"
    table = _table("schedule", "QPS", gap, "delay, s", "finished", "TTFT P50, s", "tokens/s", "MFU", "MBU", "idle",
                   "holds")  # fmt: skip
    for mode, run in data["runs"].items():
        rate, use, total = run["rate"], run["run"]["use"], run["run"]["total"]
        table.add_row(
            mode, _n(rate["qps"], 3), _n(rate["tbt_s"] * 1e3, 2), _n(rate["delay_s"], 3),
            f"{rate['finished']} of {rate['requests']}", _n(total["ttft_s"]["p50"], 3),
            _n(total.get("output_tokens_per_s"), 0), _n(use["mfu"], 3), _n(use["mbu"], 3), _n(use["idle_share"], 3),
            "yes" if rate["ok"] else "no",
        )  # fmt: skip
    return Group(table, _limits(data))


def capacity_report(data: Mapping[str, Any]) -> RenderableType:
    """The rates that were found."""
    table = _table("schedule", "QPS within the limits", "gap there, ms", "delay there, s", "rates tried")
    for mode, found in data["modes"].items():
        at = next((rate for rate in found["tried"] if rate["qps"] == found["qps"]), None)
        gap, delay = (None, None) if at is None else (at["tbt_s"] * 1e3, at["delay_s"])
        table.add_row(mode, _n(found["qps"], 3), _n(gap, 2), _n(delay, 3), str(len(found["tried"])))
    lines = [_limits(data)]
    lines.append("gain of prefetch: " + ("-" if data["gain"] is None else f"{data['gain']:.2f}×"))
    if "packing_needs_bandwidth_times" in data:
        times = data["packing_needs_bandwidth_times"]
        lines.append(
            "packing alone serves as much with " + ("no" if times is None else f"{times:.2f}×") + " HBM bandwidth"
        )
    return Group(table, "\n".join(lines))


def _limits(data: Mapping[str, Any]) -> str:
    limits = data["limits"]
    return (
        f"limits at P{limits['percentile']:g}: gaps {limits['tbt_s'] * 1e3:.2f} ms, delay to the first schedule "
        f"{limits['delay_s']:g} s; KV for {data['kv_tokens']:,} tokens"
    )


def validate_report(data: Mapping[str, Any]) -> RenderableType:
    """The paper, ours, and the real model."""
    table = _table("figure", "paper or pin", "ours", "error", "allowed", "", "real model", "over ours")
    for pin in data["pins"]:
        mark = "[green]holds[/green]" if pin["ok"] else "[red]MOVED[/red]"
        table.add_row(
            escape(pin["name"]), f"{pin['pinned']:g}", f"{pin['ours']:.4g}", f"{pin['error']:+.2%}",
            f"±{pin['tolerance']:.1%}", mark, f"{pin['real']:.4g}", f"{pin['real_over_paper_preset']:.2f}×",
        )  # fmt: skip
    return table


def crosscheck_report(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Products here and in zigzag-dse."""
    table = _table("product", "M", "N", "K", "ours, µs", "zigzag, µs", "its inner, µs", "difference", "")
    for row in rows:
        mark = "[green]agrees[/green]" if row["ok"] else "[red]differs[/red]"
        table.add_row(
            row["name"], str(row["m"]), str(row["n"]), str(row["k"]), _n(row["ours_us"], 1), _n(row["zigzag_us"], 1),
            _n(row["inner_us"], 1), f"{row['difference']:+.1%}", mark,
        )  # fmt: skip
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="left" if "mapping" in name else "right")
    return table


def _n(value: Any, digits: int = 3) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else escape(str(value))
