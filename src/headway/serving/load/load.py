"""`headway bench`: a trace replayed on any OpenAI endpoint, with a table by class, JSON, and objectives on the command
line; `headway bench convoy` is a command under it. The CLI registers this; heavy imports wait for `run`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.errors import ConfigError
from headway.core.files import check_outputs, write_output
from headway.core.parse import duration, milliseconds
from headway.serving.load import convoy
from headway.serving.load.client import (
    LoadClient,
    LoadRequest,
    TargetEndpoint,
    first_model,
    run_requests,
)
from headway.serving.load.prompts import SAFE_VOCAB, PromptPool, TextPrompts, machine, versions, vocab_size_of, whole
from headway.sim.metrics import (
    NO_TARGETS,
    RequestRecord,
    RunSummary,
    SloTargets,
    percentiles,
    request_row,
    slowest,
    summarise,
)
from headway.sim.workload import RequestTrace, TraceRequest, transforms
from headway.sim.workload.generate import PoissonArrivals, check_classes, final_classes, parse_tokens
from headway.sim.workload.traces import FORMATS, read_trace, shared_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a replay, those of the workload included, and the sub-command `convoy`."""
    where = parser.add_argument_group("where")
    where.add_argument(
        "--url", "--base-url", dest="url", default="http://127.0.0.1:8000", help="the server (default %(default)s)"
    )
    where.add_argument("--model", help="model name, or checkpoint folder (default: the first of /v1/models)")
    where.add_argument("--api-key", help="sent as a bearer token")
    where.add_argument(
        "--plain-openai", action="store_true", help="send nothing beyond OpenAI's API: no ignore_eos, min_tokens"
    )
    add_workload_arguments(parser)
    judge = parser.add_argument_group("what to report")
    judge.add_argument(
        "--goodput", nargs="+", default=[], metavar="[CLASS.]METRIC:MS", help="objectives: ttft, tbt, tpot, e2e"
    )
    judge.add_argument("--send-slo", action="store_true", help="tell the server the objectives too, by header")
    judge.add_argument(
        "--seed", type=whole(0), default=0, help="decides prompts and what is drawn (default %(default)s)"
    )
    judge.add_argument("--wide", action="store_true", help="every percentile and metric, wider than 80 columns")
    judge.add_argument("--json", type=Path, metavar="FILE", help="write results and one row a request there")
    judge.add_argument("--report", type=Path, metavar="FILE", help="write one HTML page: sentence, tables, charts")
    commands = parser.add_subparsers(dest="bench_command", metavar="convoy", required=False)
    convoy.add_arguments(
        commands.add_parser("convoy", help="one long prompt and short ones at a fixed rate: the waits of both")
    )


def run(args: argparse.Namespace) -> int:
    """Run the load, or the convoy; return 0 only if every request was answered."""
    if args.bench_command == "convoy":
        return convoy.run(args)
    from headway.sim.report.tables import say, show, tokens

    goodput = GoodputTargets(args.goodput)
    if args.send_slo and not args.goodput:
        raise ConfigError("--send-slo has nothing to send; give objectives with --goodput")
    # Separate streams of the seed: prompts do not change with the number of draws for lengths.
    check_outputs(args.json, args.report)
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
    job = partial(job_of, goodput=goodput)
    if args.sessions is None:
        # Every prompt is new.
        play = partial(run_requests, prompt=lambda request: pool.json(request.prompt_tokens), make=job)
    else:
        texts = TextPrompts(pool)
        job = partial(job, keep_ids=not args.plain_openai)
        play = partial(run_requests, prompt=texts.prompt, make=job, answered=texts.answered)
    play = partial(play, requests=requests)
    result = asyncio.run(_with_progress(endpoint, play, len(requests)))
    if args.sessions is not None:
        show(_hits_line(requests, result.records))
    return _report(args, model, description, goodput.to_json(), result)


def _hits_line(requests: Sequence[TraceRequest], records: Sequence[RequestRecord]) -> str:
    """Return what of the prompts the endpoint says it had cached, beside what they share."""
    answered = [i for i, record in enumerate(records) if record.ok]
    total = sum(records[i].prompt_tokens for i in answered)
    if not total:
        return "no turn was answered"
    cached = sum(records[i].cached_tokens for i in answered)
    shared = shared_tokens([requests[i] for i in answered], CACHE_BLOCK)
    line = f"cached by `usage`: {cached:,} of {total:,} prompt tokens ({cached / total:.1%})"
    if not cached:
        line += " - nothing was, or the endpoint does not say (prompt_tokens_details)"
    return f"{line}; the sessions share {shared / total:.1%} in blocks of {CACHE_BLOCK}"


async def _with_progress(endpoint: Any, play: Any, count: int) -> Any:
    from headway.sim.report.tables import LoadProgress

    async with LoadClient(endpoint) as client:
        with LoadProgress(count) as progress:
            return await play(client, on_sent=progress.sent, on_done=lambda record: progress.done(record.ok))


def _report(
    args: argparse.Namespace, model: str, description: dict[str, Any], goodput: dict[str, Any], result: Any
) -> int:
    from headway.sim.report.tables import (
        classes_sentence,
        classes_table,
        duration,
        error_table,
        rates_line,
        say,
        show,
        slowest_line,
    )

    summary = summarise(result.records)
    body = summary.to_json()
    judged = {record.klass for record in result.records if record.slo.any()}
    parts: list[Any] = [
        classes_sentence(body, judged),
        classes_table(body, None, judged, args.wide),
        rates_line(summary, judged=bool(goodput)),
    ]
    failed = summary.total.requests - summary.total.ok
    if failed:
        parts.append(error_table(result.records))
    for part in parts:
        show(part)
    lag = send_lag(result.records)
    # 10 ms: beyond it the client itself distorts short latencies.
    if (lag["p99"] or 0.0) > 0.01:
        say(f"[yellow]this client sent late: p99 {duration(lag['p99'])}, included in every latency[/yellow]")
    if result.interrupted:
        say("[yellow]interrupted: the figures are of what had been done by then[/yellow]")
    if args.json is not None:
        data = load_json(
            model=model, workload=description, goodput=goodput, seed=args.seed,
            summary=summary, records=result.records, interrupted=result.interrupted,
        )  # fmt: skip
        write_output(args.json, json.dumps(data, indent=1).encode() + b"\n")
        say(f"wrote {args.json}")
    if args.report is not None:
        from headway.sim.report.page import request_charts, write_page

        write_page(args.report, f"headway bench: {model}", parts, request_charts(result.records))
        say(f"wrote {args.report}")
    if (late := slowest(result.records)) is not None:
        print(slowest_line(late, f"--url {args.url}"))
    # For scripts: a run with losses must not pass as a measurement.
    return 1 if failed or result.interrupted else 0


FIRST, LATER = "first", "later"
"""Classes of sessions' requests: of each thread's first one, and of those that wait for an answer."""
_LONG_TOKENS = 8192
"""Prompts above this are of class `long` where the trace names no class: the server's own default."""


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide the workload."""
    what = parser.add_argument_group("what to replay")
    what.add_argument(
        "--trace", metavar="FILE[:FORMAT]", help=f"the trace ({', '.join(FORMATS)}; recognised if not named)"
    )
    what.add_argument("--slice", metavar="FROM:TO", help="part of the trace: requests (100:400) or seconds (60s:120s)")
    what.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="requests per second: the trace's times are stretched to it, or drawn (Poisson) where it has none",
    )
    what.add_argument("--max-prompt-tokens", type=parse_tokens, metavar="N",
        help="cut longer prompts to this; --sessions leaves sessions with longer ones out",
    )  # fmt: skip
    what.add_argument("--max-output-tokens", type=parse_tokens, metavar="N", help="cut longer outputs to this")
    what.add_argument(
        "--session-rate",
        type=float,
        default=0.1,
        metavar="R",
        help="sessions started per second, for agent traces (default %(default)s)",
    )
    sessions = parser.add_argument_group("sessions: the next turn after the answer and its think time")
    sessions.add_argument(
        "--sessions", type=int, metavar="N", help="play the first N sessions of an agents' trace as closed loops"
    )
    sessions.add_argument("--turns", type=int, metavar="N", help="the first N requests of each session (default: all)")
    sessions.add_argument(
        "--think", type=float, default=1.0, metavar="F", help="multiply think times; 0: none (default %(default)s)"
    )
    sessions.add_argument("--max-think", type=duration, metavar="S", help="cut longer think times to this")


def workload(args: argparse.Namespace, rng: np.random.Generator) -> tuple[list[TraceRequest], dict[str, Any]]:
    """Return the requests in order of arrival from 0, each with a class, and their description for the JSON.

    Raises ConfigError without a trace, for options that contradict each other and for an empty workload.
    """
    if not args.trace:
        raise ConfigError(
            "give a --trace FILE to replay, or say `headway bench convoy`; for drawn load use `vllm bench serve`, "
            "GuideLLM or AIPerf"
        )
    for name in ("max_prompt_tokens", "max_output_tokens", "rate", "session_rate", "sessions", "turns", "max_think"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    trace = _read(args.trace)
    requests = _replayed(args, trace, rng) if args.sessions is None else _sessions(args, trace, rng)
    names = ["slice", "rate", "max_prompt_tokens", "max_output_tokens", "session_rate"]
    names += ["sessions", "turns", "think", "max_think"] if args.sessions is not None else []
    return requests, {"trace": trace.name, "format": trace.format, **{name: getattr(args, name) for name in names}}


def classes_of(args: argparse.Namespace) -> set[str]:
    """Return the classes that requests may have, sent or not. Reads the trace."""
    if args.sessions is not None:
        return {FIRST, LATER}
    return final_classes(request.klass for request in _read(args.trace).requests)


def _replayed(args: argparse.Namespace, trace: RequestTrace, rng: np.random.Generator) -> list[TraceRequest]:
    requests = list(trace.requests)
    if trace.session_clock:
        # A session's clock starts at its own first request: sessions get starts at --session-rate.
        requests = transforms.start_sessions(requests, args.session_rate, rng)
    requests = transforms.slice_by(requests, args.slice) if args.slice else requests
    if trace.format == "mooncake":
        # Its stamps are those of batches, seconds apart.
        requests = transforms.spread_batches(requests, rng)
    if not trace.has_arrivals:
        if args.rate is None:
            raise ConfigError(f"{trace.name} holds no arrival times: give a --rate")
        requests = transforms.with_arrivals(requests, PoissonArrivals(args.rate), rng)
    elif args.rate is not None:
        requests = transforms.rescale_to_rate(requests, args.rate)
    requests = transforms.clip_lengths(requests, args.max_prompt_tokens, args.max_output_tokens)
    # Classes follow from the lengths that are sent, so they are set after clipping.
    requests = transforms.classify(requests, _LONG_TOKENS)
    if not requests:
        raise ConfigError(f"no request of {trace.name} is left after --slice {args.slice}")
    return requests


def _sessions(args: argparse.Namespace, trace: RequestTrace, rng: np.random.Generator) -> list[TraceRequest]:
    """Return the requests of closed sessions, of class `first` or `later`."""
    given = [f"--{name}" for name in ("slice", "rate") if getattr(args, name) is not None]
    if given:
        raise ConfigError(
            "--sessions plays sessions as they are: choose with --turns, --think, --max-think, --session-rate, "
            f"--max-prompt-tokens and --max-output-tokens, not with {', '.join(given)}"
        )
    if not 0 <= args.think < float("inf"):
        raise ConfigError(f"--think is {args.think}; it must be 0 or more")
    if not all(request.session for request in trace.requests):
        raise ConfigError(f"{trace.name} has requests without a session: --sessions needs a trace of agents")
    longest: dict[str | None, int] = {}
    most = args.max_prompt_tokens or float("inf")
    for request in trace.requests:
        longest[request.session] = max(longest.get(request.session, 0), request.prompt_tokens)
    fitting = [request for request in trace.requests if longest[request.session] <= most]
    if not fitting:
        raise ConfigError(f"every session of {trace.name} has a prompt above --max-prompt-tokens {most:g}")
    requests = transforms.close_sessions(
        fitting, PoissonArrivals(args.session_rate), rng,
        count=args.sessions, turns=args.turns, think=args.think, max_think_s=args.max_think,
    )  # fmt: skip
    requests = transforms.clip_lengths(requests, None, args.max_output_tokens)
    return [replace(request, klass=LATER if request.waits else FIRST) for request in requests]


def _read(trace: str) -> RequestTrace:
    """Read FILE:FORMAT, or FILE if a file of the whole name exists."""
    file, colon, format_name = trace.rpartition(":")
    return read_trace(file, format_name) if colon and not Path(trace).exists() else read_trace(trace)


SCHEMA = "headway.bench/1"


def load_json(
    *,
    model: str,
    workload: dict[str, Any],
    goodput: dict[str, Any],
    seed: int,
    summary: RunSummary,
    records: Sequence[RequestRecord],
    interrupted: bool,
) -> dict[str, Any]:
    """Return the file's contents. Times in seconds."""
    return {
        "schema": SCHEMA,
        "model": model,
        "workload": workload,
        "goodput_s": goodput,
        "seed": seed,
        "interrupted": interrupted,
        "machine": machine(),
        "versions": versions(),
        "summary": summary.to_json(),
        "send_lag_s": send_lag(records),
        "requests": [request_row(one) | {"sent_s": one.sent_s, "finish_reason": one.finish_reason} for one in records],
    }


def send_lag(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Return percentiles of the client's delay, sent - due, in seconds. Latencies include it."""
    return percentiles(record.sent_s - record.arrival_s for record in records if record.sent_s is not None)


# Objectives on the command line: `ttft:500 tbt:100 long.ttft:30000`, in milliseconds.

_FIELDS = {"ttft": "ttft_s", "tbt": "tbt_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}


class GoodputTargets:
    """Objectives by class. An objective without a class applies to all classes that have no value of their own."""

    def __init__(self, items: Sequence[str]) -> None:
        self._given: dict[str, SloTargets] = {}
        for item in items:
            left, colon, limit = item.partition(":")
            # From the right: the name of a class may itself have dots.
            klass, _, name = left.rpartition(".")
            # What is no time is refused with the same message as any other value that is not above 0.
            value = -1.0
            with suppress(ConfigError):
                value = milliseconds(limit)
            if not colon or name not in _FIELDS or value <= 0:
                raise ConfigError(
                    f"--goodput {item!r}: write [CLASS.]METRIC:MILLISECONDS, METRIC one of {', '.join(_FIELDS)}"
                )
            base = self._given.get(klass, NO_TARGETS)
            self._given[klass] = base.model_copy(update={_FIELDS[name]: value / 1000})

    @property
    def classes(self) -> list[str]:
        """Classes that objectives name."""
        return [klass for klass in self._given if klass]

    def of(self, klass: str) -> SloTargets:
        """Return the objectives of requests of a class."""
        common, own = self._given.get("", NO_TARGETS), self._given.get(klass, NO_TARGETS)
        return common.model_copy(update=own.model_dump(exclude_none=True))

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return class (`*`: all) → objective → seconds."""
        return {klass or "*": slo.model_dump(exclude_none=True) for klass, slo in self._given.items()}


CACHE_BLOCK = 64
"""Tokens per block of cached prefixes in traces: a prefix that reaches the end may be short by less than this."""


def job_of(
    number: int, request: TraceRequest, prompt: bytes, due_s: float, goodput: GoodputTargets, *, keep_ids: bool = False
) -> LoadRequest:
    """Return one request to send. `keep_ids`: whether the ids of its answer are asked for."""
    return LoadRequest(
        id=f"bench-{number}",
        klass=request.klass,
        due_s=due_s,
        prompt=prompt,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        slo=goodput.of(request.klass),
        answer_ids=[] if keep_ids else None,
    )
