"""A cluster as one engine: the server's `EngineClient`, with the controller behind it. Events and rosters of instances,
and one report for all of them, belong to it.

The policies (`headway.policy.placement`) and the controller (`headway.control`) are the same objects that the simulator
drives. Requests are accepted here, up to a bound, and answered here; `ClusterDriver` does what is in between. Instances
are native ones or servers behind HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import msgspec
from typing_extensions import override

from headway.core.errors import ConfigError, OverloadedError, RequestError, UnavailableError
from headway.perf.utilisation import UtilisationBase
from headway.policy.placement.contract import (
    ClusterLinks,
    RatesReplaced,
    RateTable,
    too_long,
)
from headway.runtime.cluster.driver import ClusterDriver, ClusterRules, InstanceMessages
from headway.runtime.cluster.http_backend import HttpInstance
from headway.runtime.cluster.instances import (
    ClusterReport,
    InstanceAdmin,
    InstanceReport,
    LiveInstance,
)
from headway.runtime.cluster.requests import ClusterRequest, InstanceRegistry, InstanceTable, time_limit
from headway.runtime.engine.config import accumulate_counters
from headway.runtime.engine.protocol import (
    EngineInfo,
    EngineSamples,
    EngineState,
    EngineStats,
    FromInstance,
    OutputDelta,
    SampledEngine,
    SubmitRequest,
)

log = logging.getLogger("headway.cluster")

_SAME = ("model", "architecture", "dtype", "vocab_size", "parameters", "eos_token_ids")
_SUMMED = ("kv_tokens_total", "max_num_seqs", "max_queued_requests", "weights_bytes", "kv_bytes")
_NEWEST = ("last_chunk_tokens", "last_iteration_s")
_ABSENT_S = 10.0
"""Seconds that the start waits for a server that others run, if another one serves."""


def merged_info(infos: Sequence[EngineInfo], longest: int = 0) -> EngineInfo:
    """Merge the instances' reports. longest: tokens that they hold of one request (`contract.longest_request`).

    Raises ConfigError when they do not serve the same model.
    """
    first = infos[0]
    for i, info in enumerate(infos):
        for name in _SAME:
            if getattr(info, name) != getattr(first, name):
                raise ConfigError(
                    f"instance {i} has {name} {getattr(info, name)!r}, instance 0 {getattr(first, name)!r}: "
                    "the instances of a cluster serve one model"
                )
    layouts = ", ".join(f"{count} x {name}" for name, count in sorted(Counter(i.layout for i in infos).items()))
    sums = {name: sum(getattr(info, name) for info in infos) for name in _SUMMED}
    context = min(info.context_tokens for info in infos)
    return msgspec.structs.replace(
        first,
        **sums,
        max_model_len=min(context, longest or context),
        context_tokens=context,
        layout=layouts,
        latency=None,
        utilisation=_merged_base(infos),
    )


def _merged_base(infos: Sequence[EngineInfo]) -> UtilisationBase | None:
    """Return the peaks of all instances together; None where one is not known."""
    bases = [info.utilisation for info in infos if info.utilisation is not None]
    if len(bases) < len(infos):
        return None
    return replace(
        bases[0],
        peak_flops=sum(base.peak_flops for base in bases),
        peak_bandwidth=sum(base.peak_bandwidth for base in bases),
    )


def merged_stats(all_stats: Sequence[EngineStats]) -> EngineStats:
    """Merge the instances' stats: sums of all counts, and of the last iteration's figures the largest."""
    sums = {
        name: sum(getattr(stats, name) for stats in all_stats)
        for name in EngineStats.__struct_fields__
        if name not in (*_NEWEST, "stage_busy_s", "recovering", "log_problem")
    }
    newest: dict[str, Any] = {name: max((getattr(stats, name) for stats in all_stats), default=0) for name in _NEWEST}
    return EngineStats(
        **sums,
        **newest,
        recovering=any(stats.recovering for stats in all_stats),
        log_problem=next((stats.log_problem for stats in all_stats if stats.log_problem), ""),
    )


Instances = InstanceTable[LiveInstance] | InstanceTable[HttpInstance]
Another = Callable[[int, int, int, int | None], LiveInstance]
"""Starts one more instance, from (number, pool, number of processes that had the number before, bytes of KV of the
pool's other instances; None: there are none). Raises RequestError."""


class InstanceRoster:
    """All instances of one cluster, with their tasks and the counters of those that have left. Called on the event loop
    with what happens to them, in order; what they report about requests goes to `ClusterDriver.reports`."""

    said: Callable[[int, FromInstance], None]
    """A message about a span task, a KV slice or a reservation has come."""
    heard: Callable[[int, OutputDelta], None]
    """The scheduler has emitted output of a request, or its end."""
    measured: Callable[[int], None]
    """A new stats snapshot has come."""

    def __init__(self, registry: Instances, another: Another | None, is_lost: Callable[[], bool]) -> None:
        """another: starts one more; None: none can join. is_lost: whether no instance can serve, or come."""
        self._registry, self._another, self._is_lost = registry, another, is_lost
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._incarnations: dict[int, int] = {}
        self.gone = EngineStats()
        """Counters of the instances that have left."""
        self._live: ClusterDriver | None = None
        # Nothing can be about a request before there is a controller.
        self.said = lambda number, message: None
        self.heard = lambda number, delta: None
        self.measured = lambda number: None
        self._info: EngineInfo | None = None
        self._least = 0
        self._ready: dict[int, asyncio.Future[None]] = {}
        self.receive_samples: Callable[[int, EngineSamples], None] | None = None
        """Called with samples of instances' iterations."""

    async def all_ready(self) -> None:
        """Run all instances, and return when each is ready. Raises ConfigError when one has failed."""
        loop = asyncio.get_running_loop()
        self._ready = {each.number: loop.create_future() for each in self._registry}
        for each in self._registry:
            self._look_after(each)
        await asyncio.gather(*(self._ready[each.number] for each in self._registry if each.required))
        others = {each: self._ready[each.number] for each in self._registry if isinstance(each, HttpInstance)}
        if others:
            await asyncio.wait(others.values(), timeout=_ABSENT_S)
        for future in others.values():
            if future.done():
                future.result()
        if absent := ", ".join(each.url for each, future in others.items() if not future.done()):
            if not any(future.done() for future in others.values()):
                raise ConfigError(f"no server answers at {absent}: start them, or correct the pool's urls")
            log.warning("the cluster serves without %s, which does not answer; it joins when it does", absent)

    def begin(self, live: ClusterDriver, info: EngineInfo) -> None:
        """Bring events before a controller from now on. info: what instances that join later have to agree with."""
        self._live, self._info = live, info
        self._least = min((each.info.max_model_len for each in self._registry if each.info is not None), default=0)
        self.measured = live.reports.measured
        if isinstance(live.reports, InstanceMessages):
            self.said, self.heard, live.reports.sampled = live.reports.said, live.reports.heard, self.sampled

    async def close(self) -> None:
        """End the tasks of all instances, and the wait for them."""
        for future in self._ready.values():
            if not future.done():
                future.set_exception(UnavailableError("the server is closing"))
                # Retrieved, or asyncio would log it if no caller awaits the start.
                future.exception()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- the listener -------------------------------------------------------------------------------------------------

    def joined(self, number: int) -> None:
        """A process is ready and empty: the first, or a new one."""
        ready = self._ready.get(number)
        if ready is not None and not ready.done():
            ready.set_result(None)
        if self._live is None:
            return
        if (why := self._differs(number)) is not None:
            self._registry[number].fail(why)
            return
        self._live.membership.joined(number)

    def sampled(self, number: int, samples: EngineSamples) -> None:
        """Samples of its iterations have come, for the live page."""
        if self.receive_samples is not None:
            self.receive_samples(number, samples)

    def lost(self, number: int, why: str) -> None:
        """The process is gone, after `joined`. The instance's state shows what follows."""
        if self._live is not None:
            membership = self._live.membership
            # Read before `lost`, which takes the number out of `leaving`.
            leaves = number in membership.leaving
            membership.lost(number, why)
            # Nothing is left on a lost instance: one that was being drained ends instead of restarting.
            if leaves:
                self._registry[number].drain()

    def ended(self, number: int) -> None:
        """The instance has left or was given up: nothing follows."""
        instance = self._registry[number]
        ready = self._ready.get(number)
        if ready is not None and not ready.done():
            ready.set_exception(ConfigError(f"instance {number}: {instance.failure or 'it ended while starting'}"))
        if instance.state == "left":
            self._remove(instance)
        if self._live is not None and self._is_lost():
            requests = self._live.requests
            why = instance.failure or requests.not_placeable
            requests.fail_all(UnavailableError(f"no instance is left to serve: {why}", 30.0))
        elif self._live is not None:
            self._live.membership.fail_too_long()

    def _differs(self, number: int) -> str | None:
        """Return why an instance that has joined cannot be part of this cluster; None: it can."""
        info, ours = self._registry[number].info, self._info
        assert info is not None
        assert ours is not None
        try:
            merged_info([ours, info])
        except ConfigError as error:
            return str(error)
        # Requests of up to that length have been accepted.
        least = min(ours.max_model_len, self._least)
        if info.max_model_len < least:
            return f"it holds {info.max_model_len} tokens of a request, and this cluster's instances {least} at least"
        return None

    # -- for operators ------------------------------------------------------------------------------------------------

    def _look_after(self, instance: LiveInstance | HttpInstance) -> None:
        """Start the task that runs an instance and receives its messages."""
        self._tasks[instance.number] = asyncio.create_task(instance.look_after(self))

    def reports(self) -> list[InstanceReport]:
        """Return the reports of all instances."""
        placed = Counter[int]() if self._live is None else self._live.membership.placed()
        return [self._report(each, placed) for each in self._registry]

    def _report(self, instance: LiveInstance | HttpInstance, placed: Counter[int]) -> InstanceReport:
        number, stats = instance.number, instance.stats
        membership = None if self._live is None else self._live.membership
        queued, free_in_s = (0, 0.0) if membership is None else membership.figures(number)
        if instance.state == "lost":
            queued, free_in_s = 0, 0.0
        return InstanceReport(
            id=number,
            role=instance.role,
            node=instance.node,
            host=instance.host,
            pool=instance.pool,
            state="draining" if membership is not None and number in membership.leaving else instance.state,
            incarnation=instance.incarnation,
            pid=instance.pid,
            placed=placed[number],
            running=stats.running,
            waiting=stats.waiting,
            queued_tokens=queued,
            free_in_s=free_in_s,
            kv_tokens_used=stats.kv_tokens_used,
            kv_tokens_total=0 if instance.info is None else instance.info.kv_tokens_total,
            prefill_tokens_total=stats.prefill_tokens_total,
            decode_tokens_total=stats.decode_tokens_total,
            restarts_total=stats.engine_restarts_total,
            failure=instance.failure,
        )

    def join(self, pool: int, live: ClusterDriver) -> InstanceReport:
        """See `InstanceAdmin.join`. The instance gets the lowest free number."""
        if self._another is None:
            raise RequestError("this cluster cannot start more instances", "pool")
        number = 0
        while self._registry.get(number) is not None:
            number += 1
        try:
            instance = self._another(number, pool, self._incarnations.get(number, 0), self._kv_bytes(pool))
        except OSError as error:
            raise UnavailableError(f"instance {number} cannot be started: {error}", 30.0) from error
        cast(InstanceRegistry, self._registry).add(instance)
        live.membership.reserve(number)
        self._look_after(instance)
        return self._report(instance, live.membership.placed())

    def _kv_bytes(self, pool: int) -> int | None:
        """Return the largest KV pool of a pool's instances, in bytes; None: none has reported one."""
        infos = [each.info for each in self._registry if each.pool == pool and each.info is not None]
        return max((info.kv_bytes for info in infos), default=None)

    def leave(self, number: int, live: ClusterDriver, served: int) -> InstanceReport:
        """See `InstanceAdmin.leave`. served: tokens of the longest request that is accepted."""
        instance, membership = self._registry[number], live.membership
        # Without a process there is nothing to drain: the instance leaves at once.
        if not instance.serves:
            instance.drain()
            if instance.state == "failed":
                self._remove(instance)
        elif number not in membership.leaving and instance.state == "ready":
            why = membership.refuses(membership.others(number)) or membership.shortens(number, served)
            if why is not None:
                raise RequestError(f"instance {number} cannot leave: without it {why}", "id")
            membership.close(number)
        return self._report(instance, membership.placed())

    def _remove(self, instance: LiveInstance | HttpInstance) -> None:
        """Remove an instance from the cluster, and keep its counters."""
        self.gone = accumulate_counters(self.gone, accumulate_counters(instance.stats, EngineStats()))
        # A later instance of this number goes on counting, so that its peers can tell it from this one.
        self._incarnations[instance.number] = instance.incarnation + 1
        self._registry.remove(instance.number)
        self._tasks.pop(instance.number, None)


class ClusterClient(SampledEngine, InstanceAdmin):
    """The live `EngineClient` of a whole cluster. One for each server."""

    def __init__(
        self,
        instances: Sequence[LiveInstance] | Sequence[HttpInstance],
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
        native = [each for each in instances if isinstance(each, LiveInstance)]
        servers = [each for each in instances if isinstance(each, HttpInstance)]
        self.registry: Instances = InstanceTable(servers) if servers else InstanceRegistry(native)
        self._links, self._make, self._placement = links, make, placement
        self._backends, self._in_place, self._clock = backends, in_place, clock
        self._roster = InstanceRoster(self.registry, another, lambda: self.state == "lost")
        self._live: ClusterDriver | None = None
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
        hopes = any(each.state in ("starting", "lost") for each in self.registry)
        return "recovering" if hopes else "lost"

    @property
    def _most_waiting(self) -> int:
        """Number of requests that may wait for a first token.

        The sum over all instances of the cluster, restarting ones included; without any, as many as at the start.
        """
        live = self._live
        assert live is not None
        stays = ("starting", "ready", "lost")
        stay = (each for each in self.registry if each.state in stays and each.number not in live.membership.leaving)
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
        stats = merged_stats([each.stats for each in self.registry])
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

    @override
    def on_samples(self, receive: Callable[[int, EngineSamples], None]) -> None:
        self._roster.receive_samples = receive

    async def start(self) -> EngineInfo:
        """Start the cluster and return its merged report. May be awaited by several callers."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> EngineInfo:
        try:
            await self._roster.all_ready()
            there = [each for each in self.registry if each.seen and each.info is not None]
            infos = [cast(EngineInfo, each.info) for each in there]
            if not infos:
                raise ConfigError("no instance serves that decodes")
            merged_info(infos)
            rules = self._make(infos)
            info = merged_info(infos, rules.longest([each.initial_instance for each in there]))
            live = ClusterDriver(self.registry, self._links, rules, self._backends, self._in_place, self._clock)
            live.begin()
        except ConfigError as error:
            self.failure = str(error)
            raise
        self._live, self._info = live, info
        self._roster.begin(live, info)
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
                    delta = await asked.next_delta()
                    last = delta.finish is not None
                    yield delta
        finally:
            live.requests.leave(asked)

    def _accepts(self, submit: SubmitRequest) -> ClusterDriver:
        """Return the controller, or raise the error of a request that cannot be accepted."""
        live, state = self._live, self.state
        if live is None or state in ("starting", "draining"):
            raise UnavailableError(f"the cluster is {state}", 5.0)
        if state == "lost":
            why = live.requests.not_placeable
            raise UnavailableError(f"no instance is left to serve ({why}); the cluster must be restarted", 30.0)
        unable_s = self._clock() - live.membership.unable_s
        if not submit.resubmitted and unable_s > min(each.returns_s for each in self.registry):
            raise UnavailableError("no instance serves at present", 2.0)
        live.backend.check(submit)
        if submit.id in live.requests.asked:
            raise RequestError(f"request id {submit.id!r} is in use", "id")
        why = too_long(submit.prompt_tokens, submit.params.max_tokens, self.info.max_model_len)
        if why is not None:
            raise RequestError(why, "prompt")
        most = self._most_waiting
        unanswered = live.requests.unanswered
        if not submit.resubmitted and 0 < most <= unanswered:
            raise OverloadedError(
                f"{unanswered} requests are waiting, which is the limit; try again later", live.membership.patience_s
            )
        return live

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
        await self._roster.close()
        await asyncio.gather(*(each.close() for each in self.registry))

    def end(self) -> None:
        """End all instances. For callers without an event loop. Harmless when repeated."""
        for each in self.registry:
            each.end()

    # -- for operators ------------------------------------------------------------------------------------------------

    @override
    def report(self) -> ClusterReport:
        live = self._live
        report = ClusterReport(
            placement=self._placement,
            state=self.state,
            requests=0 if live is None else len(live.requests.asked),
            waiting=0 if live is None else live.requests.waiting,
            instances=self._roster.reports(),
        )
        return report if live is None else msgspec.structs.replace(report, **live.backend.counts())

    @override
    def join(self, pool: int) -> InstanceReport:
        if self._live is None or self._drains:
            raise RequestError(f"no instance can join a cluster that is {self.state}", "pool")
        return self._roster.join(pool, self._live)

    @override
    def replace_rates(self, table: RateTable) -> None:
        if self._live is None:
            raise RequestError("the cluster is starting", "points")
        if not self._live.policies.has_rates:
            raise RequestError(f"{self._placement} has no improvement rates: tetris has", "points")
        self._live.controller.woken(self._clock(), RatesReplaced(table))

    @override
    def leave(self, number: int) -> InstanceReport:
        if self._live is None:
            raise RequestError("the cluster is starting", "id")
        return self._roster.leave(number, self._live, self.info.max_model_len)
