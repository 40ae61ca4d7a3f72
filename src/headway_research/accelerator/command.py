"""`headway accel …`: what on-chip memory and an idle HBM channel are worth (docs/papers/accelerator.md).

`stage` computes one iteration, `sweep` many over a grid. `serve` and `capacity` simulate requests by the real scheduler
in virtual time. `validate` compares with the figures of the paper, as pins that must not move.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import ConfigError
from headway.core.files import write_output
from headway.core.parse import size
from headway.core.strict_yaml import read_yaml
from headway.sim import InstanceSpec, RunSpec, simulate
from headway.sim.build import requests_of
from headway.sim.report.plots import check_picture, save
from headway.sim.report.tables import show
from headway.sim.result import run_json
from headway.sim.sweep import parse_sweep, points_of, with_field
from headway.sim.workload import TraceRequest
from headway_research.accelerator import report as tables
from headway_research.accelerator import serving, sizing
from headway_research.accelerator.machine import MIB, IterationWork
from headway_research.accelerator.stage import MODES, IterationTimeline, Mode, StageReport, simulate_stage
from headway_research.accelerator.stage_figures import PinnedFigure, pins
from headway_research.accelerator.study_file import AcceleratorStudy, AccelFile, read_study, scheduler_of

WORDS = {
    "stage": "one iteration: serial, packed, packed with prefetch; what bounds it",
    "sweep": "stages over any fields, as CSV, with the Pareto front",
    "serve": "requests at one rate, by the real scheduler",
    "capacity": "the highest rate within the limits, with and without prefetch",
    "validate": "the paper's figures beside ours; fails when one moves",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="word", metavar="WHAT", required=True)
    for word, about in WORDS.items():
        sub = commands.add_parser(word, help=about, description=about[0].upper() + about[1:] + ".")
        if word != "validate":
            sub.add_argument("file", nargs="?", type=Path, help="a YAML file (examples/accel/); none: defaults")
            sub.add_argument(
                "--set", action="append", default=[], metavar="FIELD=VALUE", help="such as machine.prefetch_buffer=1G"
            )
        sub.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON ('-': stdout, no tables)")
        if word in ("stage", "sweep", "capacity"):
            sub.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg, or both without a suffix")
        if word != "validate":
            sub.add_argument("--csv", type=Path, metavar="FILE", help="write rows ('-': stdout, no tables)")
        if word == "sweep":
            sub.add_argument(
                "--axis", action="append", default=[], metavar="FIELD=…",
                help="values of a field: START:STOP:STEP or VALUE,VALUE,…; given twice: all combinations",
            )  # fmt: skip
        if word == "serve":
            sub.add_argument("--qps", type=float, metavar="N", help="requests a second, instead of serve.workload.qps")
        if word == "capacity":
            sub.add_argument(
                "--match", action="store_true", help="also: the HBM bandwidth that packing alone would need"
            )
            sub.add_argument("--ratio", type=float, default=1.02, metavar="N", help="precision of a search (1.02)")
        if word == "validate":
            sub.add_argument("--schema", action="store_true", help="print the JSON Schema of accel files and end")


def run(arguments: argparse.Namespace) -> int:
    commands = {"stage": stage, "sweep": sweep, "serve": serve, "capacity": capacity, "validate": validate}
    check_picture(getattr(arguments, "plot", None))
    return commands[arguments.word](arguments)


def read_data(arguments: argparse.Namespace) -> tuple[dict[str, object], str, Path]:
    """Read a study's file and apply `--set`.

    Returns the plain data, the file's name in errors, and the folder to which paths in it are relative.
    """
    data: dict[str, object] = {}
    if arguments.file is not None:
        data = read_yaml(str(arguments.file), commands=("accel",))
    for text in arguments.set:
        field, values = parse_sweep(text, "--set")
        if len(values) != 1:
            raise ConfigError(f"--set {text!r}: one value; use `headway accel sweep --axis` for several")
        section = field.split(".")[0]
        # A preset by name becomes a section, so that one of its fields can be set.
        if section in ("machine", "assumptions") and isinstance(data.get(section), str):
            data[section] = {"preset": data[section]}
        data = with_field(data, field, values[0])
    folder = arguments.file.parent if arguments.file is not None else Path()
    return data, str(arguments.file or "accel"), folder


def write_json(path: Path | None, data: Any) -> bool:
    """Write JSON to a file, or to stdout for `-`; return True when it went to stdout. None: write nothing."""
    if path is None:
        return False
    return write(path, msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


def write(path: Path, body: bytes) -> bool:
    """Write bytes to a file, or to stdout for `-`; return True when they went to stdout. Raises ConfigError."""
    # The caller prints no tables then, so that stdout is valid JSON or CSV.
    if str(path) == "-":
        sys.stdout.buffer.write(body)
        return True
    write_output(path, body)
    return False


def rows_csv(rows: list[dict[str, Any]]) -> bytes:
    """Return CSV with the columns of the first row; rows is not empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


STAGE_SCHEMA, SWEEP_SCHEMA = "headway.accel.stage/1", "headway.accel.sweep/1"


def stage(arguments: argparse.Namespace) -> int:
    """Run `headway accel stage`: simulate one iteration and report it; return the exit status."""
    data, where, folder = read_data(arguments)
    study = read_study(data, where, folder)
    report = simulate_stage(study.setting, study.work)
    result = stage_json(study, report)
    quiet = write_json(arguments.json, result)
    if arguments.csv is not None:
        quiet = write(arguments.csv, rows_csv(result["operators"])) or quiet
    if not quiet:
        show(tables.stage_report(result))
    if arguments.plot is not None:
        save(tables.stage_figure(result), arguments.plot)
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """Run `headway accel sweep`: simulate the iteration at each point of a grid; return the exit status."""
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
        show(tables.sweep_report(result))
    if arguments.plot is not None:
        save(tables.sweep_figure(result), arguments.plot)
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
    found = sizing.buffer(setting, work)
    needed = sizing.packing_bandwidth(setting, work)
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
    chunk = sizing.smallest_chunk(study.setting, study.work) if report.work.decodes else None
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

    def cost(value: Any) -> float:
        return float(size(value)) if isinstance(value, str) else float(value)

    pairs = [(cost(rival[axis]), cost(row[axis])) for axis in costs]
    # 1e-9 ms: equal schedules may differ by rounding.
    pairs.append((round(rival["prefetch_ms"], 9), round(row["prefetch_ms"], 9)))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _finite(value: float) -> float | None:
    """Return None for infinity, which JSON lacks."""
    return value if value != float("inf") else None


SERVE_SCHEMA, CAPACITY_SCHEMA = "headway.accel.serve/1", "headway.accel.capacity/1"
COMPARED: tuple[Mode, Mode] = ("packing", "prefetch")


class ServiceStudy:
    """A study's `serve` section with its scheduler, KV capacity and limits."""

    def __init__(self, study: AcceleratorStudy) -> None:
        self.study, self.section = study, study.file.serve
        self.config = scheduler_of(self.section)
        self.kv_tokens = self.section.kv_tokens or serving.kv_capacity(study.setting)
        given = self.section.limits
        # Default TBT limit, the paper's rule: 32 decodes over 4K tokens each, alone.
        rule = simulate_stage(study.setting, IterationWork(decodes=32, kv_tokens=32 * 4096)).decode_s
        self.limits = serving.ServiceLimits(
            tbt_s=given.tbt_s or rule, delay_s=given.delay_s, percentile=given.percentile
        )

    def draw(self, qps: float) -> list[TraceRequest]:
        """Draw the workload's requests at `qps` requests per second, from the section's seed."""
        count = self.section.workload.requests or self.section.requests
        workload = self.section.workload.model_copy(update={"qps": qps, "requests": count})
        return requests_of(workload, None, self.section.seed)

    def instance(self, mode: Mode) -> InstanceSpec:
        """Return the simulated instance, with its latency under a schedule."""
        return serving.instance(self.study.setting, mode, self.config, self.kv_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the section and what follows from it, for `--json`."""
        return {
            "kv_tokens": self.kv_tokens,
            "limits": {
                "tbt_s": self.limits.tbt_s, "delay_s": self.limits.delay_s, "percentile": self.limits.percentile,
            },
            "serve": self.section.model_dump(mode="json", by_alias=True, exclude_none=True),
        }  # fmt: skip


def serve(arguments: argparse.Namespace) -> int:
    """Run `headway accel serve`: simulate one rate with and without prefetch; return the exit status."""
    data, where, folder = read_data(arguments)
    study = read_study(data, where, folder)
    at = ServiceStudy(study)
    qps = arguments.qps if arguments.qps is not None else at.section.workload.qps or 1.0
    if not qps > 0:
        raise ConfigError(f"--qps must be above 0, not {qps:g}")
    runs = {}
    for mode in COMPARED:
        result = simulate(at.instance(mode), at.draw(qps), RunSpec(send_slo=False, seed=at.section.seed))
        rate = serving.judged(result, qps, at.limits)
        runs[mode] = {"rate": rate.to_json(), "run": run_json(result, at.section.seed)}
    found = {"schema": SERVE_SCHEMA, "setting": study.to_json(), **at.to_json(), "runs": runs}
    quiet = write_json(arguments.json, found)
    if arguments.csv is not None:
        rows = [{"schedule": mode, **run["rate"]} for mode, run in runs.items()]
        quiet = write(arguments.csv, rows_csv(rows)) or quiet
    if not quiet:
        show(tables.serve_report(found))
    return 0


def capacity(arguments: argparse.Namespace) -> int:
    """Run `headway accel capacity`: search the highest rate within the limits, with and without prefetch."""
    if not arguments.ratio > 1:
        raise ConfigError(f"--ratio must be above 1, such as 1.02, not {arguments.ratio:g}")
    data, where, folder = read_data(arguments)
    study = read_study(data, where, folder)
    at = ServiceStudy(study)
    found: dict[str, Any] = {"schema": CAPACITY_SCHEMA, "setting": study.to_json(), **at.to_json(), "modes": {}}
    best: dict[str, float] = {}
    for mode in COMPARED:
        answer = serving.capacity(at.instance(mode), at.draw, at.limits, ratio=arguments.ratio)
        best[mode] = answer.qps
        found["modes"][mode] = {"qps": answer.qps, "tried": [rate.to_json() for rate in answer.tried]}
    # None: packing alone meets the limits at no rate.
    found["gain"] = best["prefetch"] / best["packing"] if best["packing"] else None
    if arguments.match and best["prefetch"]:
        found["packing_needs_bandwidth_times"] = serving.bandwidth_to_match(
            study.setting, at.config, at.kv_tokens, at.draw, at.limits, best["prefetch"], ratio=arguments.ratio
        )
    quiet = write_json(arguments.json, found)
    if arguments.csv is not None:
        tried = [{"schedule": mode, **rate} for mode, answer in found["modes"].items() for rate in answer["tried"]]
        quiet = write(arguments.csv, rows_csv(tried)) or quiet
    if not quiet:
        show(tables.capacity_report(found))
    if arguments.plot is not None:
        save(tables.capacity_figure(found), arguments.plot)
    return 0


SCHEMA = "headway.accel.validate/1"


def validate(arguments: argparse.Namespace) -> int:
    """Run `headway accel validate`; return 1 when a pinned figure has moved."""
    if arguments.schema:
        print(json.dumps(AccelFile.model_json_schema(), indent=2))
        return 0
    rows = pins()
    found: dict[str, Any] = {"schema": SCHEMA, "pins": [pin.to_json() for pin in rows], "summary": summary(rows)}
    ok = all(pin.ok for pin in rows)
    if not write_json(arguments.json, found):
        show(tables.validate_report(found))
        print(found["summary"])
    return 0 if ok else 1


def summary(rows: list[PinnedFigure]) -> str:
    """Return the verdict on all pins in one line."""
    paper, own = ([pin for pin in rows if pin.kind == kind] for kind in ("paper", "own"))
    worst = max(paper, key=lambda pin: abs(pin.error))
    moved = [pin.name for pin in rows if not pin.ok]
    verdict = "nothing moved" if not moved else f"MOVED: {'; '.join(moved)}"
    return (
        f"{sum(p.ok for p in paper)} of {len(paper)} paper figures within {paper[0].tolerance:.0%} "
        f"(worst {worst.error:+.2%}: {worst.name}); {sum(p.ok for p in own)} of {len(own)} own pins hold; {verdict}"
    )
