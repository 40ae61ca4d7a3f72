"""`headway accel …`: what on-chip memory and an idle HBM channel are worth (docs/papers/accelerator.md).

`stage` computes one iteration, `sweep` many over a grid. `serve` and `capacity` simulate requests by the real scheduler
in virtual time. The paper's figures beside ours are `headway reproduce packing-prefetch.case1` and its like.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType

from headway.core.errors import ConfigError
from headway.core.files import write_output
from headway.core.parse import size
from headway.core.strict_yaml import read_yaml
from headway.sim import InstanceSpec, RunSpec, simulate
from headway.sim.build import requests_of
from headway.sim.report.page import ReportChart
from headway.sim.report.plots import check_picture
from headway.sim.report.tables import show
from headway.sim.result import run_json
from headway.sim.sweep import parse_sweep, points_of, with_field
from headway.sim.workload import TraceRequest
from headway_research.accelerator import report as tables
from headway_research.accelerator import serving
from headway_research.accelerator.machine import MIB, IterationWork
from headway_research.accelerator.stage import (
    MODES,
    IterationTimeline,
    Mode,
    StageReport,
    TimelineSlot,
    buffer,
    packing_bandwidth,
    simulate_stage,
    smallest_chunk,
)
from headway_research.accelerator.study_file import AcceleratorStudy, AccelFile, read_study, scheduler_of
from headway_research.plot import draw

WORDS = {
    "stage": "one iteration: serial, packed, packed with prefetch; what bounds it",
    "sweep": "stages over any fields, as CSV, with the Pareto front",
    "serve": "requests at one rate, by the real scheduler",
    "capacity": "the highest rate within the limits, with and without prefetch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="word", metavar="WHAT", required=True)
    for word, about in WORDS.items():
        sub = commands.add_parser(word, help=about, description=about[0].upper() + about[1:] + ".")
        sub.add_argument("file", nargs="?", type=Path, help="a YAML file (examples/accel/); none: defaults")
        sub.add_argument(
            "--set", action="append", default=[], metavar="FIELD=VALUE", help="such as machine.prefetch_buffer=1G"
        )
        sub.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON ('-': stdout, no tables)")
        sub.add_argument("--csv", type=Path, metavar="FILE", help="write rows ('-': stdout, no tables)")
        if word in ("stage", "sweep", "capacity"):
            sub.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg, or both without a suffix")
        if word in ("stage", "serve"):
            sub.add_argument("--wide", action="store_true", help="every column, wider than 80 columns")
        if word == "stage":
            sub.add_argument("--schema", action="store_true", help="print the JSON Schema of accel files and end")
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


def run(arguments: argparse.Namespace) -> int:
    commands = {"stage": stage, "sweep": sweep, "serve": serve, "capacity": capacity}
    check_picture(getattr(arguments, "plot", None))
    return commands[arguments.word](arguments)


class StudySource:
    """The plain data of a study's file with `--set` applied, and what errors and paths in it refer to."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.where = str(arguments.file or "accel")
        self._folder = arguments.file.parent if arguments.file is not None else Path()
        self.data = read_yaml(str(arguments.file), commands=("accel",)) if arguments.file is not None else {}
        # a preset by name becomes a section, so that one of its fields can be set
        self.data |= {
            name: {"preset": preset}
            for name in ("machine", "assumptions")
            if isinstance(preset := self.data.get(name), str)
        }
        for text in arguments.set:
            field, values = parse_sweep(text, "--set")
            if len(values) != 1:
                raise ConfigError(f"--set {text!r}: one value; use `headway accel sweep --axis` for several")
            self.data = with_field(self.data, field, values[0])

    def study(self) -> AcceleratorStudy:
        """Compile the study. Raises ConfigError."""
        return read_study(self.data, self.where, self._folder)

    def sweep(self, axes: list[tuple[str, list[Any]]]) -> Iterator[tuple[dict[str, Any], AcceleratorStudy]]:
        """Yield (values of the axes, study) for each point of a grid."""
        for at, changed in points_of(self.data, axes):
            yield at, read_study(changed, f"{self.where} at {at}", self._folder)


def deliver(
    arguments: argparse.Namespace,
    found: dict[str, Any],
    report: Callable[[dict[str, Any]], RenderableType],
    rows: Sequence[dict[str, Any]] = (),
    charts: Callable[[dict[str, Any]], list[ReportChart]] | None = None,
) -> None:
    """Write what `--json`, `--csv` and `--plot` ask for, and print the tables unless stdout is one of them.

    rows: of the CSV, with the columns of the first. Raises ConfigError where a file cannot be written."""
    outputs = {arguments.json: msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"}
    if rows and arguments.csv is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        outputs[arguments.csv] = text.getvalue().encode()
    for path, body in outputs.items():
        if path is not None and str(path) != "-":
            write_output(path, body)
    # stdout is valid JSON or CSV: no tables beside it
    if (stdout := outputs.get(Path("-"))) is not None:
        sys.stdout.buffer.write(stdout)
    else:
        show(report(found))
    if charts is not None and arguments.plot is not None:
        draw(charts(found), arguments.plot)


STAGE_SCHEMA, SWEEP_SCHEMA = "headway.accel.stage/1", "headway.accel.sweep/1"
COMPARED: tuple[Mode, Mode] = ("packing", "prefetch")


def stage(arguments: argparse.Namespace) -> int:
    """Run `headway accel stage`: simulate one iteration and report it; return the exit status."""
    if arguments.schema:
        print(json.dumps(AccelFile.model_json_schema(), indent=2))
        return 0
    study = StudySource(arguments).study()
    found = stage_json(study, simulate_stage(study.setting, study.work))
    deliver(
        arguments, found, partial(tables.stage_report, wide=arguments.wide), found["timelines"]["prefetch"]["slots"]
    )
    if arguments.plot is not None:
        tables.draw_stage(found, arguments.plot)
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """Run `headway accel sweep`: simulate the iteration at each point of a grid; return the exit status."""
    if not arguments.axis:
        raise ConfigError("--axis: give at least one, such as --axis machine.prefetch_buffer=0,64M,128M,256M,512M")
    axes = [parse_sweep(text) for text in arguments.axis]
    rows = [{**at, **figures(study)} for at, study in StudySource(arguments).sweep(axes)]
    fields = [field for field, _ in axes]
    mark_front(rows, fields)
    found = {"schema": SWEEP_SCHEMA, "axes": fields, "rows": rows}
    deliver(arguments, found, tables.sweep_report, rows, tables.sweep_charts)
    return 0


def figures(study: AcceleratorStudy) -> dict[str, Any]:
    """Simulate a study's stage and return it as one flat row. Times in ms."""
    report = simulate_stage(study.setting, study.work)
    row: dict[str, Any] = {f"{mode}_ms": report.total_s(mode) * 1e3 for mode in MODES}
    row |= {"prefill_ms": report.prefill_s * 1e3, "decode_ms": report.decode_s * 1e3}
    for mode in COMPARED:
        row[f"{mode}_decode_speedup"] = _finite(report.decode_speedup(mode)) if report.work.decodes else None
        row[f"{mode}_overall_speedup"] = report.overall_speedup(mode)
    return row | answers_json(study, report)


def answers_json(study: AcceleratorStudy, report: StageReport) -> dict[str, Any]:
    """Return the resources that suffice for one stage: buffer, bandwidth, HBM capacity."""
    setting, work = study.setting, study.work
    found = buffer(setting, work)
    needed = packing_bandwidth(setting, work)
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
    chunk = smallest_chunk(study.setting, study.work) if report.work.decodes else None
    bandwidth = study.setting.machine.bandwidth
    return {
        "schema": STAGE_SCHEMA,
        "name": study.file.name,
        "setting": study.to_json(),
        "stage": msgspec.to_builtins(report.work),
        "figures": figures(study) | {"smallest_chunk": chunk},
        "timelines": {mode: timeline_json(getattr(report, mode), bandwidth) for mode in COMPARED},
        "first_layer_us": report.prefetch.first_s * 1e6,
        "layer_us": report.prefetch.layer_s * 1e6,
        "head_us": report.prefetch.head_s * 1e6,
    }


def timeline_json(line: IterationTimeline, bandwidth: float) -> dict[str, Any]:
    """Return the timeline of a steady-state layer, with its operators in order."""
    slots = [slot_json(slot, bandwidth) for slot in line.slots]
    return {"total_ms": line.total_s * 1e3, "layer_us": line.layer_s * 1e6, "hbm_gb": line.hbm_bytes / 1e9,
            "slots": slots}  # fmt: skip


def slot_json(slot: TimelineSlot, bandwidth: float) -> dict[str, Any]:
    """Return an operator's times, what bounds it, its traffic, and the buffer when it ends."""
    op = slot.op
    # With KV prefetched only the rest is read from HBM: compute bounds it when that takes no longer.
    ready = op.name == "decode attention" and op.compute_s * bandwidth >= slot.own_bytes
    return {
        "operator": op.name,
        "unit": op.unit,
        "start_us": slot.start_s * 1e6,
        "end_us": slot.end_s * 1e6,
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
        serve = self.section.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {"kv_tokens": self.kv_tokens, "limits": asdict(self.limits), "serve": serve}


def serve(arguments: argparse.Namespace) -> int:
    """Run `headway accel serve`: simulate one rate with and without prefetch; return the exit status."""
    study = StudySource(arguments).study()
    at = ServiceStudy(study)
    qps = arguments.qps if arguments.qps is not None else at.section.workload.qps or 1.0
    if not qps > 0:
        raise ConfigError(f"--qps must be above 0, not {qps:g}")
    runs = {}
    for mode in COMPARED:
        result = simulate(at.instance(mode), at.draw(qps), RunSpec(send_slo=False, seed=at.section.seed))
        rate = serving.judged(result, qps, at.limits)
        runs[mode] = {"rate": asdict(rate), "run": run_json(result, at.section.seed)}
    found = {"schema": SERVE_SCHEMA, "setting": study.to_json(), **at.to_json(), "runs": runs}
    rows = [{"schedule": mode, **run["rate"]} for mode, run in runs.items()]
    deliver(arguments, found, partial(tables.serve_report, wide=arguments.wide), rows)
    return 0


def capacity(arguments: argparse.Namespace) -> int:
    """Run `headway accel capacity`: search the highest rate within the limits, with and without prefetch."""
    if not arguments.ratio > 1:
        raise ConfigError(f"--ratio must be above 1, such as 1.02, not {arguments.ratio:g}")
    study = StudySource(arguments).study()
    at = ServiceStudy(study)
    answers = {
        mode: serving.capacity(at.instance(mode), at.draw, at.limits, ratio=arguments.ratio) for mode in COMPARED
    }
    packing, prefetch = (answers[mode].qps for mode in COMPARED)
    modes: dict[Mode, dict[str, Any]] = {
        mode: {"qps": each.qps, "tried": list(map(asdict, each.tried))} for mode, each in answers.items()
    }
    found = {
        "schema": CAPACITY_SCHEMA, "setting": study.to_json(), **at.to_json(), "modes": modes,
        # None: packing alone meets the limits at no rate
        "gain": prefetch / packing if packing else None,
    }  # fmt: skip
    if arguments.match and prefetch:
        found["packing_needs_bandwidth_times"] = serving.bandwidth_to_match(
            study.setting, at.config, at.kv_tokens, at.draw, at.limits, prefetch, ratio=arguments.ratio
        )
    rows = [{"schedule": mode, **rate} for mode, each in modes.items() for rate in each["tried"]]
    deliver(arguments, found, tables.capacity_report, rows, tables.capacity_charts)
    return 0
