"""A cluster of HTTP instances as one engine: the server's `EngineClient`, with an `HttpController` behind it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headway.core.errors import ConfigError, RequestError, UnavailableError
from headway.perf.hardware import ModelShape
from headway.policy.placement.contract import ClusterLinks, PlacementPolicy, Role
from headway.runtime.cluster.http_backend import HttpInstance, HttpRequest, LearnedLatency, PrefillQueue
from headway.runtime.cluster.http_driver import HttpController
from headway.runtime.cluster.http_server import HttpServer, check_supported, open_session
from headway.runtime.cluster.instances import ClusterReport, InstanceReport
from headway.runtime.cluster.requests import time_limit
from headway.runtime.cluster.server_command import ServerCommand
from headway.runtime.engine.protocol import EngineInfo, EngineState, EngineStats, OutputDelta, SubmitRequest

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("headway.cluster")

_ABSENT_S = 10.0
"""Seconds that the start waits for a server that others run, if another one serves."""
_RETURNS_S = 5.0
"""Seconds after the loss of the last instance in which new requests are accepted, and wait: it may have stalled."""


class HttpInstanceSettings(msgspec.Struct, frozen=True):
    """Where one instance is."""

    pool: int
    url: str
    process: ServerCommand | None = None
    """The command that starts it; None: the server is not the cluster's."""
    role: Role = "mixed"
    """`prefill`: it computes prompts for the others, which read their KV."""
    kv_events: str | None = None
    """Where it publishes vLLM's KV events; None: what it has cached is assumed."""


class HttpClusterRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster of HTTP instances decides by."""

    placement: str
    """The policy's name."""
    policy: Callable[[], PlacementPolicy]
    """Returns a new policy."""
    latency: LearnedLatency
    shape: ModelShape
    links: ClusterLinks
    model: EngineInfo
    """The checkpoint's facts; sizes of context and KV come from the instances."""


class HttpCluster:
    """See the module. One for each server."""

    def __init__(
        self,
        settings: Sequence[HttpInstanceSettings],
        rules: HttpClusterRules,
        *,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """api_key: sent to the instances."""
        self._settings, self._rules, self._api_key, self._clock = settings, rules, api_key, clock
        self.instances: dict[int, HttpInstance] = {}
        self._live: HttpController | None = None
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._starting: asyncio.Future[EngineInfo] | None = None
        self._info: EngineInfo | None = None
        self._drains = False
        self._unable_s = 0.0
        """When the last instance was lost."""
        self.failure: str | None = None
        """Why the cluster could not start, once that is known."""

    # -- as an engine -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        if self._info is None or self._live is None:
            return "lost" if self.failure is not None else "starting"
        if self._drains:
            return "draining"
        if self._live.able:
            return "ready"
        return "recovering" if any(each.state in ("starting", "lost") for each in self._all) else "lost"

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise UnavailableError("the cluster's instances are still starting", 5.0)
        return self._info

    @property
    def stats(self) -> EngineStats:
        """Sums over all instances; requests that are on none count as waiting."""
        loads = [each.load for each in self._all]
        return EngineStats(
            running=sum(self._running(each) for each in self._all),
            waiting=sum(load.waiting for load in loads) + (0 if self._live is None else self._live.unplaced),
            kv_tokens_used=sum(round(load.kv_usage * load.kv_tokens) for load in loads),
            kv_tokens_total=sum(load.kv_tokens for load in loads),
            recoveries_total=0 if self._live is None else self._live.retries.total,
            recovering=self.state == "recovering",
        )

    @property
    def _all(self) -> list[HttpInstance]:
        return list(self.instances.values())

    async def start(self) -> EngineInfo:
        """Start and find all instances, and return what they serve. May be awaited by several callers."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> EngineInfo:
        rules = self._rules
        session = self._session = open_session()
        for number, each in enumerate(self._settings):
            server = HttpServer(each.url, session, self._api_key)
            queue = PrefillQueue(number, rules.latency)
            self.instances[number] = HttpInstance(
                number, each.pool, server, queue, each.process, self._clock, each.role, each.kv_events
            )
        self._live = HttpController(
            self.instances, rules.links, rules.policy, rules.latency, rules.shape.layers, rules.model.eos_token_ids,
            api_key=self._api_key, clock=self._clock,
        )  # fmt: skip
        self._tasks = [asyncio.create_task(each.watch(self)) for each in self._all]
        try:
            await self._until_ready()
            info = self._describe()
        except ConfigError as error:
            self.failure = str(error)
            raise
        self._info = info
        return info

    async def _until_ready(self) -> None:
        """Wait for all instances; servers that others run may be absent as long as one serves. Raises ConfigError."""
        began_s = self._clock()
        while True:
            failed = next((each for each in self._all if each.state == "failed"), None)
            if failed is not None:
                raise ConfigError(f"instance {failed.number}: {failed.failure}")
            starting = [each for each in self._all if each.state == "starting"]
            if not starting:
                return
            late = self._clock() - began_s > _ABSENT_S
            if late and all(each.process is None for each in starting):
                urls = ", ".join(each.server.url for each in starting)
                if len(starting) == len(self._all):
                    raise ConfigError(f"no server answers at {urls}: start them, or correct the pool's urls")
                log.warning("the cluster serves without %s, which does not answer; it joins when it does", urls)
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(0.5):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _describe(self) -> EngineInfo:
        model, ready = self._rules.model, [each for each in self._all if each.state == "ready" and each.decodes]
        lengths = [each.model.max_model_len or model.max_model_len for each in ready]
        longest = min(lengths)
        if len(set(lengths)) > 1:
            log.warning("requests of up to %d tokens are served: the instances' lengths are %s", longest, lengths)
        kv_tokens = sum(each.load.kv_tokens for each in ready) or longest
        return msgspec.structs.replace(
            model,
            max_model_len=longest,
            kv_tokens_total=kv_tokens,
            kv_bytes=kv_tokens * self._rules.shape.kv_bytes_per_token,
            kv_block_tokens=max((each.load.block_tokens for each in ready), default=0),
        )

    async def generate(self, submit: SubmitRequest, prompt: bytes | memoryview) -> AsyncIterator[OutputDelta]:
        live = self._accepts(submit)
        request = HttpRequest(submit, prompt)
        try:
            with time_limit(submit, partial(self._expire, request)):
                live.ask(request)
                last = False
                while not last:
                    delta = await request.answer.get()
                    last = delta.finish is not None
                    yield delta
        finally:
            live.leave(request)
            self._look()

    def _accepts(self, submit: SubmitRequest) -> HttpController:
        """Return the controller, or raise the error of a request that cannot be accepted."""
        live, state = self._live, self.state
        if live is None or state in ("starting", "draining"):
            raise UnavailableError(f"the cluster is {state}", 5.0)
        if state == "lost":
            raise UnavailableError("no instance is left to serve; the cluster must be restarted", 30.0)
        if state == "recovering" and not submit.resubmitted and self._clock() - self._unable_s > _RETURNS_S:
            raise UnavailableError("no instance serves at present", 2.0)
        if submit.id in live.requests:
            raise RequestError(f"request id {submit.id!r} is in use", "id")
        check_supported(submit)
        return live

    def _expire(self, request: HttpRequest) -> None:
        assert self._live is not None
        if not request.life.over:
            request.send((), "timeout")
            self._live.leave(request, "it has timed out")

    async def drain(self) -> None:
        self._drains = True
        while self._live is not None and self._live.requests:
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        if self._live is not None:
            self._live.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in self._all))
        if self._session is not None:
            await self._session.close()

    # -- as a listener of instances -----------------------------------------------------------------------------------

    def joined(self, number: int) -> None:
        """An instance serves, for the first time or again."""
        assert self._live is not None
        each, info = self.instances[number], self._info
        longest = each.model.max_model_len
        if info is not None and longest is not None and longest < info.max_model_len:
            # Requests of up to that length have been accepted.
            log.error("instance %d serves up to %d tokens, the cluster %d", number, longest, info.max_model_len)
            each.state, each.failure = "failed", f"it serves up to {longest} tokens, and the others more"
            return
        self._live.joined(number)
        self._changed.set()

    def lost(self, number: int, why: str) -> None:
        """An instance that served does not answer any more, and all on it is lost."""
        assert self._live is not None
        self._live.lost(number)
        if not self._live.able:
            self._unable_s = self._clock()
        self._look()

    def ended(self, number: int) -> None:
        """An instance was given up, or has left."""
        self._changed.set()
        if self._live is not None and self.state == "lost":
            why = self.instances[number].failure or "the last one has left"
            self._live.give_up(UnavailableError(f"no instance is left to serve: {why}", 30.0))

    def measured(self, number: int) -> None:
        """An instance's load was read."""
        assert self._live is not None
        self._live.measured(number)

    def _look(self) -> None:
        """End the drained instances on which nothing is left."""
        for each in self._all:
            if each.state == "draining" and self._live is not None and self._live.quiet(each.number):
                each.leave(self)
                if each.process is not None:
                    self._tasks.append(asyncio.create_task(each.close()))

    # -- for operators ------------------------------------------------------------------------------------------------

    def report(self) -> ClusterReport:
        """See `InstanceAdmin.report`."""
        return ClusterReport(
            placement=self._rules.placement,
            state=self.state,
            requests=0 if self._live is None else len(self._live.requests),
            waiting=0 if self._live is None else self._live.unplaced,
            transfers=0,
            instances=[self._report(each) for each in self._all if each.state != "left"],
        )

    def _report(self, each: HttpInstance) -> InstanceReport:
        load = each.load
        placed, free_in_s = (0, 0.0) if self._live is None else self._live.figures(each.number)
        return InstanceReport(
            id=each.number,
            role=each.role,
            node=0,
            pool=each.pool,
            state=each.state,
            incarnation=each.incarnation,
            pid=0 if each.process is None else each.process.pid,
            placed=placed,
            running=self._running(each),
            waiting=load.waiting,
            queued_tokens=each.queue.queued_tokens,
            free_in_s=free_in_s,
            kv_tokens_used=round(load.kv_usage * load.kv_tokens),
            kv_tokens_total=load.kv_tokens,
            prefill_tokens_total=load.prompt_tokens_total,
            decode_tokens_total=load.generation_tokens_total,
            restarts_total=each.restarts,
            failure=each.failure,
        )

    def _running(self, each: HttpInstance) -> int:
        """Return an instance's requests: those of the newest scrape, or its own that are newer."""
        own = 0 if self._live is None else self._live.figures(each.number)[0]
        return max(each.load.running, own - each.load.waiting)

    def join(self, pool: int) -> InstanceReport:
        """See `InstanceAdmin.join`."""
        raise RequestError("instances of backend vllm are those of the cluster file: add it there, and restart", "pool")

    def leave(self, number: int) -> InstanceReport:
        """See `InstanceAdmin.leave`."""
        each = self.instances[number]
        others = [one for one in self._all if one.state == "ready" and one is not each and one.decodes]
        if not others and each.decodes:
            raise RequestError(f"instance {number} cannot leave: no other one serves", "id")
        assert self._live is not None
        if each.state == "ready":
            each.state = "draining"
            self._live.drain(number)
            self._look()
        return self._report(each)
