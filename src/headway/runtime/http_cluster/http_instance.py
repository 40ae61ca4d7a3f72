"""One instance of a cluster behind HTTP: its server, whether it serves, and its process if the cluster started it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from headway.policy.placement.view import ClusterInstance, Role
from headway.runtime.cluster.cached_keys import ASSUMED_BLOCK, AssumedKeys, shareable
from headway.runtime.cluster.live_instance import InstanceState
from headway.runtime.engine.restart_limits import GaveUpError, RestartLimit
from headway.runtime.http_cluster.http_request import HttpRequest
from headway.runtime.http_cluster.http_server import HttpServer, ServedModel, ServerGoneError
from headway.runtime.http_cluster.kv_events import KvEvents
from headway.runtime.http_cluster.prefill_queue import PrefillQueue
from headway.runtime.http_cluster.server_command import ServerCommand
from headway.runtime.http_cluster.server_metrics import ServerLoad

log = logging.getLogger("headway.cluster")

EVERY_S = 0.4
"""Seconds between two probes."""
_MISSES = 2
"""Probes in a row without an answer, after which an instance is lost, unless it has sent tokens meanwhile."""
_LOAD_EVERY = 4
"""Probes between two readings of the load: a metrics page takes vLLM some 20 ms."""
_MOST_RESTARTS = 3


class InstanceListener(Protocol):
    """The cluster, as its instances call it on the event loop."""

    def joined(self, number: int) -> None:
        """An instance serves, for the first time or again."""

    def lost(self, number: int, why: str) -> None:
        """An instance that served does not answer any more, and all on it is lost."""

    def ended(self, number: int) -> None:
        """An instance was given up, or has left."""

    def measured(self, number: int) -> None:
        """An instance's load was read."""


class HttpInstance:
    """See the module. `watch` runs for as long as it is part of the cluster."""

    def __init__(
        self,
        number: int,
        pool: int,
        server: HttpServer,
        queue: PrefillQueue,
        process: ServerCommand | None = None,
        clock: Callable[[], float] = time.monotonic,
        role: Role = "mixed",
        kv_events: str | None = None,
    ) -> None:
        """process: started by `watch`; None: the server is not the cluster's. kv_events: where it publishes them."""
        self.number, self.pool, self.server, self.queue, self.process = number, pool, server, queue, process
        self.role: Role = role
        self.state: InstanceState = "starting"
        self.model = ServedModel("")
        self.load = ServerLoad()
        self.cached = AssumedKeys()
        self._events = None if kv_events is None else KvEvents(kv_events)
        self.restarts = 0
        self.incarnation = 0
        self.failure: str | None = None
        """Why it was given up."""
        self._clock = clock
        self._limit = RestartLimit(_MOST_RESTARTS, "its server")
        self._probes = self._misses = 0
        self._alive = False
        self._due = asyncio.Event()

    @property
    def decodes(self) -> bool:
        """Whether policies place requests on it; the others compute prompts for these."""
        return self.role != "prefill"

    @property
    def initial_instance(self) -> ClusterInstance:
        """The instance without any requests, as policies see it."""
        return ClusterInstance(id=self.number, node=0, role=self.role, capacity=self.load.kv_tokens)

    def cached_tokens(self, request: HttpRequest, prompt_tokens: int) -> int:
        """Return how many tokens of a request's prompt, answer so far included, the server has cached: as it reports,
        or as is assumed until it has reported any."""
        blocks = None if self._events is None else self._events.blocks
        if blocks is None or not blocks.block_tokens:
            return ASSUMED_BLOCK * self.cached.match(shareable(request.text, prompt_tokens, ASSUMED_BLOCK))
        size = blocks.block_tokens
        return size * blocks.match(shareable(request.text_in(size), prompt_tokens, size))

    def _forget_events(self) -> None:
        if self._events is not None:
            self._events.stop()

    def note_alive(self) -> None:
        """Note that the server has sent tokens: it is alive, however late its probes are."""
        self._alive = True

    def probe_now(self) -> None:
        """Have `watch` probe at once: a stream has broken off."""
        self._due.set()

    async def watch(self, listener: InstanceListener) -> None:
        """Start the server if it is ours, probe it, and report what becomes of it, until it is given up or leaves."""
        if self.process is not None:
            await self.process.start()
        while self.state not in ("failed", "left"):
            await self._probe(listener)
            self._due.clear()
            # A second miss is not waited for.
            if self._misses:
                continue
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._due.wait()
            except TimeoutError:
                continue

    async def _probe(self, listener: InstanceListener) -> None:
        process = self.process
        if process is not None and process.ended:
            await self._restart(process, listener)
            return
        if not await self.server.healthy():
            self._missed(listener)
            return
        self._misses, self._alive = 0, False
        self._probes += 1
        try:
            if self.state in ("starting", "lost"):
                self.model = await self.server.model()
                await self._measure()
                self.state = "ready"
                self._limit.record_up(self._clock())
                listener.joined(self.number)
                # The cluster may have refused it.
                if self._events is not None and self.state == "ready":
                    self._events.start()
            elif self._probes % _LOAD_EVERY == 0:
                await self._measure()
                listener.measured(self.number)
        except ServerGoneError as error:
            log.debug("instance %d: %s", self.number, error)
            self._missed(listener)

    async def _measure(self) -> None:
        self.load = await self.server.load()
        self.queue.report(self.load.prefill_s)

    def _missed(self, listener: InstanceListener) -> None:
        self._misses = 0 if self._alive else self._misses + 1
        self._alive = False
        if self._misses >= _MISSES:
            self._misses = 0
            self._lose(listener, f"{self.server.url} does not answer")

    def _lose(self, listener: InstanceListener, why: str) -> None:
        if self.state in ("ready", "draining"):
            self.state = "left" if self.state == "draining" else "lost"
            self.incarnation += 1
            self.load = ServerLoad()
            self.queue.clear()
            self.cached.clear()
            self._forget_events()
            log.warning("instance %d is lost: %s", self.number, why)
            listener.lost(self.number, why)

    async def _restart(self, process: ServerCommand, listener: InstanceListener) -> None:
        """Start the server again after its process has ended."""
        why = f"the server has ended; {process.last_words()}"
        first = self.state == "starting" and not self.incarnation
        self._lose(listener, why)
        if self.state == "left":
            return
        try:
            if first:
                raise GaveUpError(why)
            self._limit.spend(self._clock(), why)
        except GaveUpError as error:
            self._give_up(listener, str(error))
            return
        self.restarts += 1
        # Children of the dead process may still hold the port.
        process.kill()
        await process.start()

    def _give_up(self, listener: InstanceListener, why: str) -> None:
        self.state, self.failure = "failed", why
        log.error("instance %d is given up: %s", self.number, why)
        listener.ended(self.number)

    def leave(self, listener: InstanceListener) -> None:
        """End its part in the cluster, once nothing is left on it. A server that is ours is ended by `close`."""
        self.state = "left"
        self._forget_events()
        self._due.set()
        listener.ended(self.number)

    async def close(self) -> None:
        """End the server if it is ours."""
        self._forget_events()
        if self.process is not None:
            await self.process.stop()
