"""A cluster as one engine: the server's `EngineClient`, with a `LiveController` behind it.

The policies (`headway.policy.placement`) and the controller (`headway.control`) are the same objects that the simulator
drives. Requests are accepted here, up to a bound, and answered here; `LiveController` does what is in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import cast

import msgspec

from headway.core.errors import ConfigError, OverloadedError, RequestError, UnavailableError
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.groups import GroupLatency
from headway.policy.placement.base import PlacementPolicy, RatesReplaced
from headway.policy.placement.tetris_rates import RateTable
from headway.policy.placement.view import ClusterLinks
from headway.runtime.cluster.client_answer import time_limit
from headway.runtime.cluster.cluster_report import ClusterReport, InstanceReport
from headway.runtime.cluster.cluster_request import ClusterRequest
from headway.runtime.cluster.instance_events import InstanceEvents
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.instance_roster import Another
from headway.runtime.cluster.live_backend import LatencyOf
from headway.runtime.cluster.live_controller import DecisionLog, LiveController
from headway.runtime.cluster.live_instance import LiveInstance
from headway.runtime.cluster.merged_reports import merged_info, merged_stats
from headway.runtime.engine.cumulative_counters import accumulate_counters
from headway.runtime.engine.protocol import (
    EngineInfo,
    EngineSamples,
    EngineState,
    EngineStats,
    OutputDelta,
    SubmitRequest,
)

log = logging.getLogger("headway.cluster")


class ClusterRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that depend on the instances' own reports, made once they are ready."""

    policy: Callable[[], PlacementPolicy]
    """Returns a new policy."""
    latency: GroupLatency
    """Predictor of spans and prompts."""
    shape: ModelShape
    latency_of: LatencyOf | None = None
    """Predictor of one instance; None: `latency` for all."""
    rows: int = 0
    """Most rows of a span that an instance computes at once (`SpanTask.rows`); 0: all."""
    log: DecisionLog | None = None
    """Log of all decisions."""


class ClusterClient:
    """The live `EngineClient` of a whole cluster. One for each server."""

    def __init__(
        self,
        instances: Sequence[LiveInstance],
        links: ClusterLinks,
        make: Callable[[Sequence[EngineInfo]], ClusterRules],
        *,
        placement: str,
        another: Another | None = None,
        backends: int = 16,
        in_place: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """make: called with the instances' reports once all are ready. placement: the policy's name. another: starts
        one more instance; None: none can join. backends: KV slices that an instance receives at a time. in_place:
        groups decode where their KV lies, instead of gathering it on one instance. clock: seconds, of the same clock as
        the event loop's.
        """
        self.fleet = InstanceRegistry(instances)
        self._links, self._make, self._placement = links, make, placement
        self._backends, self._in_place, self._clock = backends, in_place, clock
        self._events = InstanceEvents(self.fleet, another, lambda: self.state == "lost")
        self._roster = self._events.roster
        self._live: LiveController | None = None
        self._starting: asyncio.Future[EngineInfo] | None = None
        self._info: EngineInfo | None = None
        self._drains = False
        self.failure: str | None = None
        """Why the cluster could not start, once that is known."""

    # -- as an engine -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        if self._info is None or self._live is None:
            return "lost" if self.failure is not None else "starting"
        if self._drains:
            return "draining"
        if self._live.requests.not_placeable is None:
            return "ready"
        # instances that are not there may come
        hopes = any(each.state in ("starting", "lost") for each in self.fleet)
        return "recovering" if hopes else "lost"

    @property
    def _most_waiting(self) -> int:
        """Number of requests that may wait for a first token.

        The sum over all instances of the cluster, restarting ones included; without any, as many as at the start.
        """
        live = self._live
        assert live is not None
        stays = ("starting", "ready", "lost")
        stay = (each for each in self.fleet if each.state in stays and each.number not in live.membership.leaving)
        return sum(each.info.max_queued_requests for each in stay if each.info is not None) or (
            self.info.max_queued_requests
        )

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise UnavailableError("the cluster's instances are still starting")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Sums over all instances; requests that are not placed yet count as waiting."""
        live = self._live
        stats = merged_stats([each.stats for each in self.fleet], 0)
        if live is not None:
            running = stats.running + live.requests.running
            waiting = stats.waiting + live.requests.waiting
            stats = msgspec.structs.replace(
                stats,
                running=running,
                waiting=waiting,
                lost_tokens_total=stats.lost_tokens_total + live.requests.retries.lost_tokens,
                recovering=self.state == "recovering",
            )
        return accumulate_counters(self._roster.gone, stats)

    def on_samples(self, receive: Callable[[int, EngineSamples], None]) -> None:
        """See `SampledEngine`."""
        self._events.receive_samples = receive

    async def start(self) -> EngineInfo:
        """Start the cluster and return its merged report. May be awaited by several callers."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> EngineInfo:
        instances = list(self.fleet)
        try:
            await self._events.all_ready()
            infos = [cast(EngineInfo, each.info) for each in instances]
            info = merged_info(infos)
            rules = self._make(infos)
            losses = max(each.config.max_restarts for each in instances)
            live = LiveController(
                self.fleet,
                self._links,
                rules.policy,
                rules.latency_of or (lambda info: rules.latency),
                rules.shape,
                self._backends,
                losses,
                self._in_place,
                rules.rows,
                rules.log,
                self._clock,
            )
            live.membership.renew()
            live.membership.restart_silent()
            if live.requests.not_placeable is not None:
                raise ConfigError(live.requests.not_placeable)
        except ConfigError as error:
            self.failure = str(error)
            raise
        self._live, self._info = live, info
        self._events.begin(live, info)
        return info

    async def generate(self, submit: SubmitRequest, prompt: bytes | memoryview) -> AsyncIterator[OutputDelta]:
        live = self._accepts(submit)
        asked = ClusterRequest(submit, prompt)
        try:
            with time_limit(submit, partial(self._expire, asked)):
                live.requests.begin(asked)
                live.settle()
                last = False
                while not last:
                    delta = await asked.answer.get()
                    last = delta.finish is not None
                    yield delta
        finally:
            live.requests.leave(asked)

    def _accepts(self, submit: SubmitRequest) -> LiveController:
        """Return the controller, or raise the error of a request that cannot be accepted."""
        live, state = self._live, self.state
        if live is None or state in ("starting", "draining"):
            raise UnavailableError(f"the cluster is {state}", 5.0)
        if state == "lost":
            why = live.requests.not_placeable
            raise UnavailableError(f"no instance is left to serve ({why}); the cluster must be restarted", 30.0)
        if submit.id in live.requests.asked:
            raise RequestError(f"request id {submit.id!r} is in use", "id")
        self._check_size(submit)
        most = self._most_waiting
        unanswered = live.requests.unanswered
        if not submit.resubmitted and unanswered >= most:
            raise OverloadedError(
                f"{unanswered} requests are waiting, which is the limit; try again later", live.membership.patience_s
            )
        return live

    def _check_size(self, submit: SubmitRequest) -> None:
        """Raise RequestError for a request whose KV no single instance can hold, which a decode may need."""
        holds = max((each.info.kv_tokens_total for each in self.fleet if each.info is not None), default=0)
        needed = submit.prompt_tokens + submit.params.max_tokens
        if needed > holds:
            raise RequestError(
                f"the prompt's {submit.prompt_tokens} tokens and max_tokens {submit.params.max_tokens} add up to "
                f"{needed}; the largest instance's KV pool holds {holds}",
                "prompt",
            )

    def _expire(self, asked: ClusterRequest) -> None:
        assert self._live is not None
        asked.tell(OutputDelta(id=asked.submit.id, finish="timeout"))
        self._live.requests.leave(asked, "it has timed out")

    async def drain(self) -> None:
        self._drains = True
        while self._live is not None and self._live.requests.asked:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        if self._live is not None:
            self._live.close()
        self._events.close()
        self.end()

    def end(self) -> None:
        """End all instances. For callers without an event loop. Harmless when repeated."""
        for each in self.fleet:
            each.end()

    # -- for operators ------------------------------------------------------------------------------------------------

    def report(self) -> ClusterReport:
        """See `InstanceAdmin.report`."""
        live = self._live
        return ClusterReport(
            placement=self._placement,
            state=self.state,
            requests=0 if live is None else len(live.requests.asked),
            waiting=0 if live is None else live.requests.waiting,
            transfers=0 if live is None else live.hands.moves.under_way,
            decodes_moved=0 if live is None else live.hands.stays.halted,
            groups_grown=0 if live is None else live.hands.steps.grown,
            groups_shrunk=0 if live is None else live.hands.steps.shrunk,
            instances=self._roster.reports(None if live is None else live.membership),
        )

    def join(self, pool: int) -> InstanceReport:
        """See `InstanceAdmin.join`."""
        if self._live is None or self._drains:
            raise RequestError(f"no instance can join a cluster that is {self.state}", "pool")
        return self._roster.join(pool, self._live.membership)

    def replace_rates(self, table: RateTable) -> None:
        """See `ImprovementRateAdmin`."""
        if self._live is None:
            raise RequestError("the cluster is starting", "points")
        if not self._live.policies.has_rates:
            raise RequestError(f"{self._placement} has no improvement rates: tetris has", "points")
        self._live.machine.woken(self._clock(), RatesReplaced(table))

    def leave(self, number: int) -> InstanceReport:
        """See `InstanceAdmin.leave`."""
        if self._live is None:
            raise RequestError("the cluster is starting", "id")
        return self._roster.leave(number, self._live.membership)
