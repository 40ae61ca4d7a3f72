"""Requests and arrival times of a load run: from a trace, a preset, or two length distributions."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.errors import ConfigError
from headway.serving.load.arguments import tokens
from headway.sim.workload import RequestTrace, TraceRequest, transforms
from headway.sim.workload.arrivals import PoissonArrivals, arrivals
from headway.sim.workload.classes import final_classes
from headway.sim.workload.presets import PRESETS, WorkloadPreset, preset, simple
from headway.sim.workload.readers import FORMATS, read_trace
from headway.sim.workload.specs import parse_lengths

DEFAULT_REQUESTS = 100
FIRST, LATER = "first", "later"
"""Classes of sessions' requests: of each thread's first one, and of those that wait for an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide the workload."""
    _add_requests(parser)
    _add_sessions(parser)
    _add_arrivals(parser)


def _add_requests(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("which requests")
    what.add_argument(
        "--trace", metavar="FILE[:FORMAT]", help=f"replay a trace ({', '.join(FORMATS)}; recognised if not named)"
    )
    what.add_argument("--slice", metavar="FROM:TO", help="part of the trace: requests (100:400) or seconds (60s:120s)")
    what.add_argument("--preset", metavar="NAME", help=f"a named mix: {', '.join(PRESETS)}")
    what.add_argument(
        "--input", metavar="SPEC", default="lognormal:median=500,p90=2000", help="prompt lengths (default %(default)s)"
    )
    what.add_argument(
        "--output", metavar="SPEC", default="lognormal:median=64,p90=256", help="output lengths (default %(default)s)"
    )
    what.add_argument(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"at most so many (default: the whole trace, or {DEFAULT_REQUESTS})",
    )
    what.add_argument("--duration", type=float, metavar="S", help="only those that arrive within so many seconds")
    what.add_argument("--max-prompt-tokens", type=tokens, metavar="N",
        help="cut longer prompts to this; --sessions leaves sessions with longer ones out",
    )  # fmt: skip
    what.add_argument("--max-output-tokens", type=tokens, metavar="N", help="cut longer outputs to this")
    what.add_argument("--prompt-scale", type=float, default=1.0, metavar="F", help="multiply prompt lengths")
    what.add_argument("--output-scale", type=float, default=1.0, metavar="F", help="multiply output lengths")
    what.add_argument(
        "--long-threshold",
        type=tokens,
        default=8192,
        metavar="N",
        help="longer prompts are class long (default %(default)s)",
    )
    what.add_argument(
        "--share-prefixes", action="store_true", help="prompts of a session share what the trace says was cached"
    )


def _add_sessions(parser: argparse.ArgumentParser) -> None:
    sessions = parser.add_argument_group("sessions: the next turn after the answer and its think time")
    sessions.add_argument(
        "--sessions", type=int, metavar="N", help="play the first N sessions of an agents' trace as closed loops"
    )
    sessions.add_argument("--turns", type=int, metavar="N", help="the first N requests of each session (default: all)")
    sessions.add_argument(
        "--think", type=float, default=1.0, metavar="F", help="multiply think times; 0: none (default %(default)s)"
    )
    sessions.add_argument("--max-think", type=float, metavar="S", help="cut longer think times to this")


def _add_arrivals(parser: argparse.ArgumentParser) -> None:
    when = parser.add_argument_group("when they arrive")
    when.add_argument(
        "--arrivals", choices=("trace", "poisson", "gamma", "constant"), help="default: the trace's, else poisson"
    )
    when.add_argument(
        "--rate", type=float, metavar="R", help="requests per second; a trace's own times are stretched to it"
    )
    when.add_argument(
        "--cv", type=float, default=2.0, help="coefficient of variation of gamma arrivals (default %(default)s)"
    )
    when.add_argument("--rescale", type=float, metavar="F", help="multiply a trace's times: 2 halves its rate")
    when.add_argument(
        "--spread-batches", action="store_true", help="spread requests with equal stamps up to the next stamp"
    )
    when.add_argument(
        "--session-rate",
        type=float,
        default=0.1,
        metavar="R",
        help="sessions started per second, for agent traces (default %(default)s)",
    )


def workload(args: argparse.Namespace, rng: np.random.Generator) -> tuple[list[TraceRequest], dict[str, Any]]:
    """Return the requests in order of arrival from 0, each with a class, and their description for the JSON.

    Raises ConfigError for options that contradict each other and for an empty workload.
    """
    for name in (
        "num_requests",
        "duration",
        "max_prompt_tokens",
        "max_output_tokens",
        "rate",
        "rescale",
        "session_rate",
        "prompt_scale",
        "output_scale",
        "sessions",
        "turns",
        "max_think",
    ):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    if args.sessions is not None:
        return _sessions(args, rng)
    requests, source = _from_trace(args, rng) if args.trace else _drawn(args, rng)
    requests = transforms.scale_lengths(requests, args.prompt_scale, args.output_scale)
    requests = transforms.clip_lengths(requests, args.max_prompt_tokens, args.max_output_tokens)
    if args.duration is not None:
        requests = [request for request in requests if request.arrival_s < args.duration]
    # Classes follow from the lengths that are sent, so they are set after scaling and clipping.
    requests = transforms.classify(requests[: args.num_requests], args.long_threshold)
    if not requests:
        raise ConfigError("no request is left after slicing and cutting the workload")
    settings = (
        "max_prompt_tokens",
        "max_output_tokens",
        "prompt_scale",
        "output_scale",
        "long_threshold",
        "share_prefixes",
    )
    return requests, {**source, **{name: getattr(args, name) for name in settings}}


def classes_of(args: argparse.Namespace) -> set[str]:
    """Return the classes that requests may have, sent or not. Reads the trace, if there is one."""
    if args.sessions is not None:
        return {FIRST, LATER}
    if args.trace:
        return final_classes(request.klass for request in _read(args.trace).requests)
    return final_classes(part.klass for part in preset(args.preset).parts) if args.preset else final_classes([""])


def _drawn(args: argparse.Namespace, rng: np.random.Generator) -> tuple[list[TraceRequest], dict[str, Any]]:
    if args.arrivals == "trace":
        raise ConfigError("--arrivals trace needs a --trace")
    rate, kind = args.rate or 1.0, args.arrivals or "poisson"
    mix: WorkloadPreset = (
        preset(args.preset) if args.preset else simple(parse_lengths(args.input), parse_lengths(args.output, "output"))
    )
    # Enough to fill --duration: twice the expected number, since the rest is cut off later.
    count = args.num_requests or (round(args.duration * rate * 2) + 50 if args.duration else DEFAULT_REQUESTS)
    requests = mix.draw(rng, arrivals(kind, rate, args.cv), count)
    lengths = (
        {"preset": args.preset, "fitted": mix.fitted} if args.preset else {"input": args.input, "output": args.output}
    )
    return requests, {**lengths, "arrivals": kind, "rate_rps": rate, "cv": args.cv if kind == "gamma" else None}


def _sessions(args: argparse.Namespace, rng: np.random.Generator) -> tuple[list[TraceRequest], dict[str, Any]]:
    """Return the requests of closed sessions, of class `first` or `later`, and their description."""
    others = ("preset", "slice", "num_requests", "duration", "arrivals", "rate", "rescale")
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(args, name) is not None]
    given += ["--share-prefixes"] if args.share_prefixes else []
    if not args.trace or given or args.prompt_scale != 1.0 or args.output_scale != 1.0:
        raise ConfigError(
            "--sessions plays the sessions of a --trace as they are: choose with --turns, --think, --max-think, "
            "--session-rate, --max-prompt-tokens and --max-output-tokens"
            + (f", not with {', '.join(given)}" if given else "")
        )
    if not 0 <= args.think < float("inf"):
        raise ConfigError(f"--think is {args.think}; it must be 0 or more")
    trace = _read(args.trace)
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
    names = ("sessions", "turns", "think", "max_think", "session_rate", "max_prompt_tokens", "max_output_tokens")
    settings = {name: getattr(args, name) for name in names}
    classed = [replace(request, klass=LATER if request.waits else FIRST) for request in requests]
    return classed, {"trace": trace.name, "format": trace.format, **settings}


def _read(trace: str) -> RequestTrace:
    """Read FILE:FORMAT, or FILE if a file of the whole name exists."""
    file, colon, format_name = trace.rpartition(":")
    return read_trace(file, format_name) if colon and not Path(trace).exists() else read_trace(trace)


def _from_trace(args: argparse.Namespace, rng: np.random.Generator) -> tuple[list[TraceRequest], dict[str, Any]]:
    if args.preset:
        raise ConfigError("--trace and --preset exclude each other")
    trace = _read(args.trace)
    kind = args.arrivals or ("trace" if trace.has_arrivals else "poisson")
    requests = _placed(args, trace, rng)
    if kind == "trace":
        if not trace.has_arrivals:
            raise ConfigError(f"{trace.name} holds no arrival times; use --arrivals poisson --rate R")
        if args.spread_batches:
            requests = transforms.spread_batches(requests, rng)
        if args.rate is not None:
            requests = transforms.rescale_to_rate(requests, args.rate)
    else:
        rate = args.rate or _mean_rate(requests) or 1.0
        requests = transforms.with_arrivals(requests, arrivals(kind, rate, args.cv), rng)
    if args.rescale is not None:
        requests = transforms.rescale_time(requests, args.rescale)
    names = ("slice", "rate", "rescale", "spread_batches")
    source = {
        "trace": trace.name,
        "format": trace.format,
        "arrivals": kind,
        **{name: getattr(args, name) for name in names},
    }
    return requests, {**source, "session_rate": args.session_rate if trace.session_clock else None}


def _placed(args: argparse.Namespace, trace: RequestTrace, rng: np.random.Generator) -> list[TraceRequest]:
    requests = list(trace.requests)
    if trace.session_clock:
        # A session's clock starts at its own first request: sessions get starts at --session-rate.
        requests = transforms.start_sessions(requests, args.session_rate, rng)
    return transforms.slice_by(requests, args.slice) if args.slice else requests


def _mean_rate(requests: list[TraceRequest]) -> float | None:
    """Return requests per second over the trace; None without a time span."""
    span_s = requests[-1].arrival_s if requests else 0.0
    return (len(requests) - 1) / span_s if span_s > 0 else None
