"""Requests and arrival times of a load run: a trace, replayed at its own times or as sessions that wait for answers."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.errors import ConfigError
from headway.serving.load.arguments import tokens
from headway.sim.workload import RequestTrace, TraceRequest, transforms
from headway.sim.workload.arrivals import PoissonArrivals
from headway.sim.workload.classes import final_classes
from headway.sim.workload.readers import FORMATS, read_trace

FIRST, LATER = "first", "later"
"""Classes of sessions' requests: of each thread's first one, and of those that wait for an answer."""
_LONG_TOKENS = 8192
"""Prompts above this are of class `long` where the trace names no class: the server's own default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    what.add_argument("--max-prompt-tokens", type=tokens, metavar="N",
        help="cut longer prompts to this; --sessions leaves sessions with longer ones out",
    )  # fmt: skip
    what.add_argument("--max-output-tokens", type=tokens, metavar="N", help="cut longer outputs to this")
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
    sessions.add_argument("--max-think", type=float, metavar="S", help="cut longer think times to this")


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
