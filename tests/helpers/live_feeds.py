"""Feeds of the live page from simulated runs, as an engine and its server would fill them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.helpers.polling import until
from tests.helpers.unit_latency import small_machine

from headway.policy.iteration.config import SchedulerConfig
from headway.runtime.engine.core import IterationSampler
from headway.serving.live.feed import FollowedRequest, LiveFeed
from headway.sim.loop import simulate
from headway.sim.replay import ReplayedRun, _ReplayState, replay
from headway.sim.spec import InstanceSpec, RunSpec
from headway.sim.workload import TraceRequest

CONVOY = [TraceRequest(0.0, 30_000, 8), *(TraceRequest(0.05 + 0.2 * i, 200, 16) for i in range(12))]
EVERY_S = 0.1


def logged_events(workload: Sequence[TraceRequest] = CONVOY, **fields: Any) -> list[dict[str, Any]]:
    """The event log of a simulated run."""
    fields = {"t_target_s": 0.02, **fields}
    events: list[dict[str, Any]] = []
    spec = InstanceSpec(config=SchedulerConfig(**fields), latency=small_machine(), kv_tokens=60_000, block_tokens=16)
    simulate(spec, workload, RunSpec(timeout_s=60.0), log=lambda kind, more: events.append({"event": kind, **more}))
    return json.loads(json.dumps(events))


def sampled_feed(events: Sequence[dict[str, Any]]) -> tuple[LiveFeed, ReplayedRun]:
    """The feed of a server whose engine had these events, and the run."""
    run = replay(events, detail=True)
    feed = LiveFeed(run.config.policy, run.config.t_target_s, 4_000)
    state = _ReplayState(replay(events[:1]), events[0], False)
    sampler = IterationSampler(state.scheduler)
    happenings = [(one.arrival_s, 0, lambda one=one: feed.arrived(followed(one))) for one in run.records]
    for one in run.records:
        happenings += [(at_s, 2, lambda one=one, at_s=at_s: feed.tokens(one.id, at_s)) for at_s in one.token_s]
        if one.finish_s is not None:
            happenings.append(
                (one.finish_s, 3, lambda one=one: feed.ended(one.id, one.finish_s or 0.0, "length", None))
            )
    taken_s = 0.0
    for event in events[1:]:

        def happen(event: dict[str, Any] = event) -> None:
            nonlocal taken_s
            getattr(state, f"on_{event['event']}")(event)
            sampler.note(event["event"], event)
            if event["at_s"] - taken_s >= EVERY_S:
                taken_s = event["at_s"]
                feed.sampled(0, sampler.take())

        happenings.append((event["at_s"], 1, happen))
    for _, _, happen_now in sorted(happenings, key=lambda one: one[:2]):
        happen_now()
    feed.sampled(0, sampler.take())
    return feed, run


def followed(record: Any) -> FollowedRequest:
    """A record's request as it arrives."""
    return FollowedRequest(record.id, record.klass, record.arrival_s, record.prompt_tokens)


@contextmanager
def log_page(events: Sequence[dict[str, Any]] | None = None) -> Iterator[str]:
    """Yield the page's address. events: of the log, by default of a convoy."""
    import uvicorn

    from headway.serving.live.pages import LogPlayer, create_app
    from headway.serving.live.recordings import EngineRecording

    app = create_app(LogPlayer(EngineRecording(replay(events or logged_events(), detail=True)), "convoy.jsonl"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, 60.0)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
