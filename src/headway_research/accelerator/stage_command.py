"""`headway accel stage` and `sweep`: one iteration, or many over a grid, as numbers, tables and pictures."""

from __future__ import annotations

import argparse
from typing import Any

from headway.core.errors import ConfigError
from headway.perf.accelerator import sizing as answers
from headway.perf.accelerator.machine_model import MIB
from headway.perf.accelerator.stage import StageReport, simulate_stage
from headway.perf.accelerator.timeline import MODES, IterationTimeline
from headway.sim.sweep import parse_sweep, points_of
from headway_research.accelerator.command import read_data
from headway_research.accelerator.output import rows_csv, write, write_json
from headway_research.accelerator.study_file import AcceleratorStudy, read_study

STAGE_SCHEMA, SWEEP_SCHEMA = "headway.accel.stage/1", "headway.accel.sweep/1"


def stage(arguments: argparse.Namespace) -> int:
    """Run `headway accel stage`: simulate one iteration and report it; return the exit status."""
    from headway.sim.report.accel_table import stage_report
    from headway.sim.report.console import show

    data, where, folder = read_data(arguments)
    study = read_study(data, where, folder)
    report = simulate_stage(study.setting, study.work)
    result = stage_json(study, report)
    quiet = write_json(arguments.json, result)
    if arguments.csv is not None:
        quiet = write(arguments.csv, rows_csv(result["operators"])) or quiet
    if not quiet:
        show(stage_report(result))
    if arguments.plot is not None:
        from headway.sim.report.accel_plot import stage_figure
        from headway.sim.report.style import save

        save(stage_figure(result), arguments.plot)
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """Run `headway accel sweep`: simulate the iteration at each point of a grid; return the exit status."""
    from headway.sim.report.accel_table import sweep_report
    from headway.sim.report.console import show

    if not arguments.axis:
        raise ConfigError("--axis: give at least one, such as --axis machine.prefetch_buffer=0,64M,128M,256M,512M")
    data, where, folder = read_data(arguments)
    axes = [parse_sweep(text) for text in arguments.axis]
    # A preset by name becomes a section, so that an axis can set one of its fields.
    for name in ("machine", "assumptions"):
        if isinstance(data.get(name), str):
            data[name] = {"preset": data[name]}
    rows = []
    for at, changed in points_of(data, axes):
        study = read_study(changed, f"{where} at {at}", folder)
        rows.append({**at, **figures(study)})
    mark_front(rows, [field for field, _ in axes])
    result = {"schema": SWEEP_SCHEMA, "axes": [field for field, _ in axes], "rows": rows}
    quiet = write_json(arguments.json, result)
    if arguments.csv is not None:
        quiet = write(arguments.csv, rows_csv(rows)) or quiet
    if not quiet:
        show(sweep_report(result))
    if arguments.plot is not None:
        from headway.sim.report.accel_plot import sweep_figure
        from headway.sim.report.style import save

        save(sweep_figure(result), arguments.plot)
    return 0


def figures(study: AcceleratorStudy) -> dict[str, Any]:
    """Simulate a study's stage and return it as one flat row. Times in ms."""
    report = simulate_stage(study.setting, study.work)
    row: dict[str, Any] = {f"{mode}_ms": report.total_s(mode) * 1e3 for mode in MODES}
    row |= {"prefill_ms": report.prefill_s * 1e3, "decode_ms": report.decode_s * 1e3}
    for mode in ("packing", "prefetch"):
        row[f"{mode}_decode_speedup"] = _finite(report.decode_speedup(mode)) if report.work.decodes else None
        row[f"{mode}_overall_speedup"] = report.overall_speedup(mode)
    return row | answers_json(study, report)


def answers_json(study: AcceleratorStudy, report: StageReport) -> dict[str, Any]:
    """Return the resources that suffice for one stage: buffer, bandwidth, HBM capacity."""
    setting, work = study.setting, study.work
    found = answers.buffer(setting, work)
    needed = answers.packing_bandwidth(setting, work)
    used = report.memory_bytes
    return {
        "kv_layer_mib": found.kv / MIB,
        "hidden_mib": report.prefetch.hidden / MIB,
        "hides_all": found.hides,
        "smallest_buffer_mib": None if found.smallest is None else found.smallest / MIB,
        "useful_buffer_mib": found.useful / MIB,
        "idle_window_mib": found.window / MIB,
        "packing_needs_gbps": None if needed is None else needed / 1e9,
        "hbm_gb": used / 1e9,
        "fits": used <= setting.machine.capacity,
    }


def stage_json(study: AcceleratorStudy, report: StageReport) -> dict[str, Any]:
    """Return all results of one stage, as `--json` writes them."""
    chunk = answers.smallest_chunk(study.setting, study.work) if report.work.decodes else None
    return {
        "schema": STAGE_SCHEMA,
        "name": study.file.name,
        "setting": study.to_json(),
        "stage": {name: getattr(report.work, name) for name in report.work.__struct_fields__},
        "figures": figures(study) | {"smallest_chunk": chunk},
        "operators": operators_json(study, report),
        "timelines": {mode: timeline_json(getattr(report, mode)) for mode in ("packing", "prefetch")},
        "first_layer_us": report.prefetch.first_s * 1e6,
        "layer_us": report.prefetch.layer_s * 1e6,
        "head_us": report.prefetch.head_s * 1e6,
    }


def operators_json(study: AcceleratorStudy, report: StageReport) -> list[dict[str, Any]]:
    """Return the operators of a steady-state layer with prefetch, in order of the timeline, and the LM head."""
    bandwidth = study.setting.machine.bandwidth
    rows = []
    for slot in report.prefetch.slots:
        op = slot.op
        # With KV prefetched only the rest is read from HBM: compute bounds it when that takes no longer.
        ready = op.name == "decode attention" and op.compute_s * bandwidth >= slot.own_bytes
        rows.append(
            {
                "operator": op.name,
                "unit": op.unit,
                "start_us": slot.start_s * 1e6,
                "us": (slot.end_s - slot.start_s) * 1e6,
                "compute_us": op.compute_s * 1e6,
                "hbm_us": slot.own_bytes / bandwidth * 1e6,
                "fill_us": op.fill_bytes / bandwidth * 1e6,
                "bound": "compute" if ready else op.bound(bandwidth),
                "hbm_mib": slot.own_bytes / MIB,
                "prefetched_mib": slot.prefetched / MIB,
                "buffered_mib": slot.buffered / MIB,
                "peak_mib": op.peak_bytes / MIB,
                "mapping": op.mapping,
            }
        )
    return rows


def timeline_json(line: IterationTimeline) -> dict[str, Any]:
    """Return the timeline of a steady-state layer: times, units, and buffer occupancy of each operator."""
    return {
        "total_ms": line.total_s * 1e3,
        "layer_us": line.layer_s * 1e6,
        "hbm_gb": line.hbm_bytes / 1e9,
        "slots": [
            {
                "operator": slot.op.name,
                "unit": slot.op.unit,
                "start_us": slot.start_s * 1e6,
                "end_us": slot.end_s * 1e6,
                "own_mib": slot.own_bytes / MIB,
                "prefetched_mib": slot.prefetched / MIB,
                "buffered_mib": slot.buffered / MIB,
                "compute_us": slot.op.compute_s * 1e6,
            }
            for slot in line.slots
        ],
    }


def mark_front(rows: list[dict[str, Any]], axes: list[str]) -> None:
    """Set `pareto` in each row: True when no other row of the same work beats it (`_beats`).

    axes: the swept fields; those of `machine` are costs, all others define the work. Without a cost no row is marked.
    """
    costs = [axis for axis in axes if axis.startswith("machine.") and axis != "machine.preset"]
    others = [axis for axis in axes if axis not in costs]
    for row in rows:
        # Rows of other work are no rivals.
        rivals = [r for r in rows if r is not row and all(r[axis] == row[axis] for axis in others)]
        row["pareto"] = bool(costs) and not any(_beats(rival, row, costs) for rival in rivals)


def _beats(rival: dict[str, Any], row: dict[str, Any], costs: list[str]) -> bool:
    """Return whether `rival` is no worse in any cost and in time, and better in one of them."""
    from headway.core.units import size

    def cost(value: Any) -> float:
        return float(size(value)) if isinstance(value, str) else float(value)

    pairs = [(cost(rival[axis]), cost(row[axis])) for axis in costs]
    # 1e-9 ms: equal schedules may differ by rounding.
    pairs.append((round(rival["prefetch_ms"], 9), round(row["prefetch_ms"], 9)))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _finite(value: float) -> float | None:
    """Return None for infinity, which JSON lacks."""
    return value if value != float("inf") else None
