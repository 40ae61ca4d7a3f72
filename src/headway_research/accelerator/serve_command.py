"""`headway accel serve` and `capacity`: requests on the accelerator, by the real scheduler in virtual time."""

from __future__ import annotations

import argparse
from typing import Any

from headway.core.errors import ConfigError
from headway.perf.accelerator.iteration_work import IterationWork
from headway.perf.accelerator.stage import simulate_stage
from headway.perf.accelerator.timeline import Mode
from headway.sim import InstanceSpec, RunSpec, simulate
from headway.sim.requests import requests_of
from headway.sim.result_json import run_json
from headway.sim.workload import TraceRequest
from headway_research.accelerator import capacity as service
from headway_research.accelerator.command import read_data
from headway_research.accelerator.output import rows_csv, write, write_json
from headway_research.accelerator.study_file import AcceleratorStudy, read_study, scheduler_of

SERVE_SCHEMA, CAPACITY_SCHEMA = "headway.accel.serve/1", "headway.accel.capacity/1"
COMPARED: tuple[Mode, Mode] = ("packing", "prefetch")


class ServiceStudy:
    """A study's `serve` section with its scheduler, KV capacity and limits."""

    def __init__(self, study: AcceleratorStudy) -> None:
        self.study, self.section = study, study.file.serve
        self.config = scheduler_of(self.section)
        self.kv_tokens = self.section.kv_tokens or service.kv_capacity(study.setting)
        given = self.section.limits
        # Default TBT limit, the paper's rule: 32 decodes over 4K tokens each, alone.
        rule = simulate_stage(study.setting, IterationWork(decodes=32, kv_tokens=32 * 4096)).decode_s
        self.limits = service.ServiceLimits(
            tbt_s=given.tbt_s or rule, delay_s=given.delay_s, percentile=given.percentile
        )

    def draw(self, qps: float) -> list[TraceRequest]:
        """Draw the workload's requests at `qps` requests per second, from the section's seed."""
        count = self.section.workload.requests or self.section.requests
        workload = self.section.workload.model_copy(update={"qps": qps, "requests": count})
        return requests_of(workload, None, self.section.seed)

    def instance(self, mode: Mode) -> InstanceSpec:
        """Return the simulated instance, with its latency under a schedule."""
        return service.instance(self.study.setting, mode, self.config, self.kv_tokens)

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
    from headway.sim.report.accel_table import serve_report
    from headway.sim.report.console import show

    data, where, folder = read_data(arguments)
    study = read_study(data, where, folder)
    at = ServiceStudy(study)
    qps = arguments.qps if arguments.qps is not None else at.section.workload.qps or 1.0
    if not qps > 0:
        raise ConfigError(f"--qps must be above 0, not {qps:g}")
    runs = {}
    for mode in COMPARED:
        result = simulate(at.instance(mode), at.draw(qps), RunSpec(send_slo=False, seed=at.section.seed))
        rate = service.judged(result, qps, at.limits)
        runs[mode] = {"rate": rate.to_json(), "run": run_json(result, at.section.seed)}
    found = {"schema": SERVE_SCHEMA, "setting": study.to_json(), **at.to_json(), "runs": runs}
    quiet = write_json(arguments.json, found)
    if arguments.csv is not None:
        rows = [{"schedule": mode, **run["rate"]} for mode, run in runs.items()]
        quiet = write(arguments.csv, rows_csv(rows)) or quiet
    if not quiet:
        show(serve_report(found))
    return 0


def capacity(arguments: argparse.Namespace) -> int:
    """Run `headway accel capacity`: search the highest rate within the limits, with and without prefetch."""
    from headway.sim.report.accel_table import capacity_report
    from headway.sim.report.console import show

    if not arguments.ratio > 1:
        raise ConfigError(f"--ratio must be above 1, such as 1.02, not {arguments.ratio:g}")
    data, where, folder = read_data(arguments)
    study = read_study(data, where, folder)
    at = ServiceStudy(study)
    found: dict[str, Any] = {"schema": CAPACITY_SCHEMA, "setting": study.to_json(), **at.to_json(), "modes": {}}
    best: dict[str, float] = {}
    for mode in COMPARED:
        answer = service.capacity(at.instance(mode), at.draw, at.limits, ratio=arguments.ratio)
        best[mode] = answer.qps
        found["modes"][mode] = {"qps": answer.qps, "tried": [rate.to_json() for rate in answer.tried]}
    # None: packing alone meets the limits at no rate.
    found["gain"] = best["prefetch"] / best["packing"] if best["packing"] else None
    if arguments.match and best["prefetch"]:
        found["packing_needs_bandwidth_times"] = service.bandwidth_to_match(
            study.setting, at.config, at.kv_tokens, at.draw, at.limits, best["prefetch"], ratio=arguments.ratio
        )
    quiet = write_json(arguments.json, found)
    if arguments.csv is not None:
        tried = [{"schedule": mode, **rate} for mode, answer in found["modes"].items() for rate in answer["tried"]]
        quiet = write(arguments.csv, rows_csv(tried)) or quiet
    if not quiet:
        show(capacity_report(found))
    if arguments.plot is not None:
        from headway.sim.report.accel_plot import capacity_figure
        from headway.sim.report.style import save

        save(capacity_figure(found), arguments.plot)
    return 0
