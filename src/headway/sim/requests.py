"""Compile a scenario's workload section to requests: draws, traces, cuts. All randomness comes from the run's seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headway.core.errors import ConfigError
from headway.sim.recorded_workload import is_event_log, recorded_trace
from headway.sim.workload import TraceRequest, transforms
from headway.sim.workload.arrivals import ArrivalProcess, arrivals
from headway.sim.workload.classes import final_classes
from headway.sim.workload.presets import MixPart, WorkloadPreset, preset
from headway.sim.workload.readers import read_trace
from headway.sim.workload.rewriting import rewrite
from headway.sim.workload.section import SessionsSection, WorkloadSection
from headway.sim.workload.specs import parse_lengths
from headway.sim.workload.trace_request import RequestTrace

DEFAULT_REQUESTS = 1000


def requests_of(section: WorkloadSection, window_s: float | None, seed: int) -> list[TraceRequest]:
    """Return the workload of one run, by arrival, each request with a class. Raises ConfigError when none is left, and
    for a negative seed."""
    if seed < 0:
        raise ConfigError(f"seed {seed}: seeds are whole numbers from 0")
    # a stream of its own: noise and patience are seeded apart, so that they do not change the requests
    rng = np.random.default_rng([seed, 1])
    if section.sessions is not None:
        requests = _sessions(section, section.sessions, rng)
    else:
        requests = _traced(section, rng) if section.trace else _drawn(section, window_s, rng)
    if section.long_rule is not None:
        requests = rewrite(requests, section.long_rule, rng)
    if section.long_share is not None:
        requests = _with_longs(requests, section, rng)
    # lengths are cut after the long ones are put in, so that max_prompt bounds those too
    requests = transforms.clip_lengths(requests, section.max_prompt, section.max_output)
    requests = transforms.classify(requests[: section.requests], section.long_threshold)
    if window_s is not None:
        requests = [request for request in requests if request.arrival_s < window_s or request.waits]
    if not requests:
        raise ConfigError("workload: no request is left after slicing and cutting")
    return requests


def classes_of(section: WorkloadSection) -> set[str]:
    """Return the classes that the workload's requests may have, drawn or not. Reads the trace, if it is one."""
    if section.long_rule is not None:
        return {"short", "long"}
    if section.trace:
        names = {request.klass for trace in _read(section) for request in trace.requests}
    else:
        parts = preset(section.preset).parts if section.preset else section.mix or ()
        names = {part.klass for part in parts}
    return final_classes(names) | ({"long"} if section.long_share is not None else set())


def _drawn(section: WorkloadSection, window_s: float | None, rng: np.random.Generator) -> list[TraceRequest]:
    mix = preset(section.preset) if section.preset else _mix(section)
    return mix.draw(rng, _arrivals(section, section.qps or 1.0), draws_of(section, window_s))


def draws_of(section: WorkloadSection, window_s: float | None) -> int:
    """Return how many requests are drawn for a window, which then cuts those that arrive later."""
    if section.draws is not None:
        return section.draws
    rate = section.qps or 1.0
    if section.requests is None and window_s is not None:
        # expected arrivals, six standard deviations more (cv scales them), and 50 for short windows
        return int(window_s * rate + 6 * (window_s * rate) ** 0.5 * max(1.0, section.cv)) + 50
    return section.requests or DEFAULT_REQUESTS


def _mix(section: WorkloadSection) -> WorkloadPreset:
    parts = tuple(
        MixPart(part.share, part.klass, parse_lengths(part.prompt), parse_lengths(part.output, "output"))
        for part in section.mix or ()
    )
    return WorkloadPreset("given", "given", parts)


class _AtOnce:
    """Arrival process with every request at time 0."""

    def times(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.zeros(count)


def _arrivals(section: WorkloadSection, rate: float) -> ArrivalProcess:
    if section.arrivals == "at-once":
        return _AtOnce()
    return arrivals(section.arrivals or "poisson", rate, section.cv)


def _traced(section: WorkloadSection, rng: np.random.Generator) -> list[TraceRequest]:
    traces = _read(section)
    for trace in traces:
        if trace.session_clock:
            raise ConfigError(f"{trace.name}: its sessions have no common clock: give workload.sessions")
    requests = transforms.rebase(request for trace in traces for request in trace.requests)
    if section.slice:
        requests = transforms.slice_by(requests, section.slice)
    # files of lengths only get Poisson arrivals unless the scenario names others
    timeless = next((trace for trace in traces if not trace.has_arrivals), None)
    kind = section.arrivals or ("poisson" if timeless else "trace")
    if kind != "trace":
        return transforms.with_arrivals(requests, _arrivals(section, section.qps or 1.0), rng)
    if timeless:
        raise ConfigError(f"workload.arrivals: {timeless.name} holds no arrival times; choose poisson and a qps")
    return requests if section.qps is None else transforms.rescale_to_rate(requests, section.qps)


def _read(section: WorkloadSection) -> list[RequestTrace]:
    """Read the traces. Texts of different ones share nothing."""
    assert section.trace is not None
    names = (section.trace,) if isinstance(section.trace, str) else section.trace
    traces = [recorded_trace(Path(name)) if is_event_log(Path(name)) else read_trace(name) for name in names]
    return [traces[0], *(transforms.in_namespace(trace, n) for n, trace in enumerate(traces[1:], start=1))]


def _sessions(section: WorkloadSection, sessions: SessionsSection, rng: np.random.Generator) -> list[TraceRequest]:
    """Return the requests of closed sessions, which start at random."""
    requests = [request for trace in _read(section) for request in trace.requests]
    if not all(request.session for request in requests):
        raise ConfigError("workload.sessions: the trace has requests without a session")
    return transforms.close_sessions(
        requests, _arrivals(section, section.qps or 1.0), rng,
        count=sessions.count, turns=sessions.turns, think=sessions.think, max_think_s=sessions.max_think_s,
    )  # fmt: skip


def _with_longs(requests: list[TraceRequest], section: WorkloadSection, rng: np.random.Generator) -> list[TraceRequest]:
    """Replace a random share of the requests by draws of the long preset; arrival times stay."""
    assert section.long_share is not None
    # drawn for every request, used or not, so that another share keeps the same lengths
    longs = preset(section.long_preset).draw(rng, _AtOnce(), len(requests))
    chosen = rng.random(len(requests)) < section.long_share
    return [
        TraceRequest(old.arrival_s, new.prompt_tokens, new.output_tokens, klass="long") if pick else old
        for old, new, pick in zip(requests, longs, chosen.tolist(), strict=True)
    ]
