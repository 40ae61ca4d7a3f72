"""`headway bench`: a trace replayed on any OpenAI endpoint, a table per class, JSON and plots."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import ConfigError
from headway.core.output_file import check_outputs, write_output

if TYPE_CHECKING:
    from headway.sim.metrics import RequestRecord
    from headway.sim.workload import TraceRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a replay, those of the workload included."""
    from headway.serving.load import load_workload
    from headway.serving.load.arguments import whole

    where = parser.add_argument_group("where")
    where.add_argument(
        "--url", "--base-url", dest="url", default="http://127.0.0.1:8000", help="the server (default %(default)s)"
    )
    where.add_argument("--model", help="model name, or checkpoint folder (default: the first of /v1/models)")
    where.add_argument("--api-key", help="sent as a bearer token")
    where.add_argument(
        "--plain-openai", action="store_true", help="send nothing beyond OpenAI's API: no ignore_eos, min_tokens"
    )
    load_workload.add_arguments(parser)
    judge = parser.add_argument_group("what to report")
    judge.add_argument(
        "--goodput", nargs="+", default=[], metavar="[CLASS.]METRIC:MS", help="objectives: ttft, tbt, tpot, e2e"
    )
    judge.add_argument("--send-slo", action="store_true", help="tell the server the objectives too, by header")
    judge.add_argument(
        "--seed", type=whole(0), default=0, help="decides prompts and what is drawn (default %(default)s)"
    )
    judge.add_argument("--json", type=Path, metavar="FILE", help="write results and one row a request there")
    judge.add_argument("--plot", type=Path, metavar="FILE", help="draw CDFs and waits there (.png or .svg)")


def run(args: argparse.Namespace) -> int:
    """Run the load; return 0 only if every request was answered."""
    import numpy as np

    from headway.serving.load.client import TargetEndpoint
    from headway.serving.load.closed_loop import run_closed_loop
    from headway.serving.load.endpoint import first_model
    from headway.serving.load.goodput import GoodputTargets
    from headway.serving.load.load_jobs import job_of, jobs
    from headway.serving.load.load_workload import classes_of, workload
    from headway.serving.load.open_loop import run_open_loop
    from headway.serving.load.prompts import SAFE_VOCAB, PromptPool, vocab_size_of
    from headway.serving.load.text_prompts import TextPrompts
    from headway.sim.report.plots import check_picture
    from headway.sim.report.tables import say, show, tokens
    from headway.sim.workload.classes import check_classes

    goodput = GoodputTargets(args.goodput)
    if args.send_slo and not args.goodput:
        raise ConfigError("--send-slo has nothing to send; give objectives with --goodput")
    # Separate streams of the seed: prompts do not change with the number of draws for lengths.
    check_outputs(args.json)
    check_picture(args.plot)
    requests, description = workload(args, np.random.default_rng((args.seed, 0)))
    check_classes("--goodput ", goodput.classes, requests, partial(classes_of, args))
    folder = args.model is not None and Path(args.model).is_dir()
    model = args.model if args.model is not None and not folder else str(first_model(args.url, args.api_key)["id"])
    vocab_size = vocab_size_of(args.model) or SAFE_VOCAB
    longest = max(request.prompt_tokens for request in requests)
    pool = PromptPool(np.random.default_rng((args.seed, 1)), vocab_size, longest)
    endpoint = TargetEndpoint(
        base_url=args.url,
        model=model,
        api_key=args.api_key,
        extensions=not args.plain_openai,
        send_slo=args.send_slo,
    )
    total = sum(request.prompt_tokens for request in requests)
    span = f"over {requests[-1].arrival_s:.1f} s"
    if args.sessions is not None:
        threads = len({(request.session, request.thread) for request in requests})
        span = f"in {threads} threads, {requests[-1].arrival_s:.1f} s of the trace's time,"
    say(
        f"{len(requests)} requests {span} to [bold]{model}[/bold]: "
        f"{tokens(total)} prompt tokens (longest {tokens(longest)}), ids below {vocab_size}"
    )
    if args.sessions is None:
        made = jobs(requests, pool, goodput)
        play = partial(run_open_loop, jobs=made)
    else:
        job = partial(job_of, goodput=goodput, keep_ids=not args.plain_openai)
        play = partial(run_closed_loop, requests=requests, prompts=TextPrompts(pool), make=job)
    result = asyncio.run(_with_progress(endpoint, play, len(requests)))
    if args.sessions is not None:
        show(_hits_line(requests, result.records))
    return _report(args, model, description, goodput.to_json(), result)


def _hits_line(requests: Sequence[TraceRequest], records: Sequence[RequestRecord]) -> str:
    """Return what of the prompts the endpoint says it had cached, beside what they share."""
    from headway.serving.load.load_jobs import CACHE_BLOCK
    from headway.sim.workload.prompt_text import shared_tokens

    answered = [i for i, record in enumerate(records) if record.ok]
    total = sum(records[i].prompt_tokens for i in answered)
    if not total:
        return "no turn was answered"
    cached = sum(records[i].cached_tokens for i in answered)
    shared = shared_tokens([requests[i] for i in answered], CACHE_BLOCK)
    said = f"cached by `usage`: {cached:,} of {total:,} prompt tokens ({cached / total:.1%})"
    if not cached:
        said += " - nothing was, or the endpoint does not say (prompt_tokens_details)"
    return f"{said}; the sessions share {shared / total:.1%} in blocks of {CACHE_BLOCK}"


async def _with_progress(endpoint: Any, play: Any, count: int) -> Any:
    from headway.serving.load.client import LoadClient
    from headway.sim.report.progress import LoadProgress

    async with LoadClient(endpoint) as client:
        with LoadProgress(count) as progress:
            return await play(client, on_sent=progress.sent, on_done=lambda record: progress.done(record.ok))


def _report(
    args: argparse.Namespace, model: str, description: dict[str, Any], goodput: dict[str, Any], result: Any
) -> int:
    from headway.serving.load.load_json import load_json, send_lag
    from headway.sim.metrics import summarise
    from headway.sim.report.tables import duration, error_table, load_table, rates_line, say, show

    summary = summarise(result.records)
    show(load_table(summary))
    show(rates_line(summary, judged=bool(goodput)))
    lag = send_lag(result.records)
    # 10 ms: beyond it the client itself distorts short latencies.
    if (lag["p99"] or 0.0) > 0.01:
        say(f"[yellow]this client sent late: p99 {duration(lag['p99'])}, included in every latency[/yellow]")
    failed = summary.total.requests - summary.total.ok
    if failed:
        show(error_table(result.records))
    if result.interrupted:
        say("[yellow]interrupted: the figures are of what had been done by then[/yellow]")
    if args.json is not None:
        data = load_json(
            model=model, workload=description, goodput=goodput, seed=args.seed,
            summary=summary, records=result.records, interrupted=result.interrupted,
        )  # fmt: skip
        write_output(args.json, json.dumps(data, indent=1).encode() + b"\n")
        say(f"wrote {args.json}")
    if args.plot is not None:
        from headway.sim.report.plots import load_figure, save

        for written in save(load_figure(result.records), args.plot):
            say(f"wrote {written}")
    # For scripts: a run with losses must not pass as a measurement.
    return 1 if failed or result.interrupted else 0
