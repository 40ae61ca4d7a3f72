"""`headway plan question.yaml`, or `headway plan --model … --gpu … --qps …`: the cheapest deployment that meets latency
demands on a workload."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING

from headway.core.errors import ConfigError
from headway.core.files import check_outputs

if TYPE_CHECKING:
    from headway.planning.question import PlanQuestion
    from headway.planning.search import PlanErrorBars, PlanResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="?", type=Path, help="a YAML file (examples/plan-chat-and-documents.yaml)")
    flags = parser.add_argument_group("a question without a file")
    flags.add_argument("--model", metavar="NAME", help="a named model, or the path of a config.json")
    flags.add_argument(
        "--gpu",
        metavar="NAME",
        help="name of the accelerator; up to eight are used (--set accelerators.0.most=N: more)",
    )
    flags.add_argument("--qps", metavar="N", help="requests per second")
    flags.add_argument(
        "--mix",
        metavar="KIND:SHARE,…",
        help="chat (median 1,500 tokens in, 100 out) and document (200,000 in, 500 out), such as "
        "chat:0.95,document:0.05 (default: chat:1)",
    )
    flags.add_argument(
        "--ttft-ms",
        metavar="KIND:MS,…",
        help="limits of the P90 of the time to first token; a number alone is for the first kind (default: "
        "chat:1000,document:120000; P99 of gaps between tokens of chats: 200 ms)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="set a field, such as workload.qps=2"
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: one a core)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write plan.json, scenario.yaml, serve.sh and cluster.yaml there"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, no tables")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write one HTML page: sentence, tables, chart")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep results in a file, and go on from those that it holds"
    )
    parser.add_argument(
        "--front", action="store_true", help="search dearer plans too, for the whole Pareto front of cost and latency"
    )
    parser.add_argument("--schema", action="store_true", help="print the JSON Schema of questions and end")


def run(arguments: argparse.Namespace) -> int:
    import json

    from headway.planning.question import PlanQuestion

    if arguments.schema:
        print(json.dumps(PlanQuestion.model_json_schema(), indent=2))
        return 0
    question = _read(arguments)
    check_outputs(arguments.report)
    result, bars = _search(question, arguments)
    if arguments.json:
        import msgspec

        from headway.planning.answer import result_json

        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(result_json(result, bars)), indent=1) + b"\n")
    else:
        from headway.planning.answer import plan_report
        from headway.sim.report.tables import show

        show(plan_report(result, bars))
    if arguments.report is not None:
        from headway.planning.answer import candidates_chart, candidates_table, plan_report
        from headway.sim.report.page import write_page

        parts = [plan_report(result, bars), candidates_table(result)]
        write_page(arguments.report, "headway plan", parts, [candidates_chart(result)])
    if arguments.out is not None:
        from headway.planning.answer import write_files

        for path in write_files(result, arguments.out, bars):
            print(path, file=sys.stderr)
    # scripts can tell "no plan" from a plan
    return 0 if result.best is not None else 1


def _read(arguments: argparse.Namespace) -> PlanQuestion:
    from headway.core.strict_yaml import read_yaml
    from headway.planning.question import parse_question, question_data
    from headway.sim.sweep import parse_sweep, with_field

    flags = [arguments.model, arguments.gpu, arguments.qps, arguments.mix, arguments.ttft_ms]
    where = "the flags" if arguments.question is None else str(arguments.question)
    if arguments.question is not None:
        if any(flag is not None for flag in flags):
            raise ConfigError(f"{where} is a whole question: change it with --set (such as --set workload.qps=2)")
        data = read_yaml(where, commands=("plan",))
    elif None in flags[:3]:
        raise ConfigError(
            "name a question file (such as examples/plan-chat-and-documents.yaml), or give --model, --gpu and --qps"
        )
    else:
        model, gpu, qps, mix, ttft_ms = flags
        data = question_data(model, gpu, qps, mix or "chat:1", ttft_ms)
    for text in arguments.set:
        field, values = parse_sweep(text, "--set")
        data = with_field(data, field, values[0] if len(values) == 1 else values)
    if arguments.front:
        data = with_field(data, "search.front", True)
    return parse_question(data, where)


def _search(question: PlanQuestion, arguments: argparse.Namespace) -> tuple[PlanResult, PlanErrorBars | None]:
    from headway.core.settings import processes_of
    from headway.planning.answer import measure_line, question_line, read_measures
    from headway.planning.search import PlanSearch, error_bars
    from headway.planning.simulate import CandidateMeasure, MeasureRunner, SimulationJob
    from headway.sim.report.tables import RunProgress

    jobs = processes_of(arguments.jobs)
    known = read_measures(arguments.resume, question) if arguments.resume is not None else {}
    with ExitStack() as stack:
        file: IO[str] | None = None
        if arguments.resume is not None:
            import json

            try:
                if known:
                    # a line that was cut off must not be gone on with
                    os.truncate(arguments.resume, arguments.resume.read_bytes().rfind(b"\n") + 1)
                file = stack.enter_context(arguments.resume.open("a" if known else "w"))
            except OSError as error:
                raise ConfigError(f"cannot write {arguments.resume}: {error.strerror}") from error
            if not known:
                file.write(json.dumps(question_line(question)) + "\n")
        progress = stack.enter_context(RunProgress(None))

        def keep(job: SimulationJob, one: CandidateMeasure) -> None:
            if file is not None:
                file.write(measure_line(job, one) + "\n")
                file.flush()
            progress.done(one.candidate.name)

        runner = stack.enter_context(MeasureRunner(jobs, keep, known))
        result = PlanSearch(question, runner).run()
        return result, error_bars(result, runner)
