"""What happens to a cluster's instances, from their start on: brought before the controller, once there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headway.core.errors import ConfigError, UnavailableError
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.instance_roster import Another, InstanceRoster
from headway.runtime.cluster.live_controller import LiveController
from headway.runtime.cluster.merged_reports import merged_info
from headway.runtime.engine.instance_protocol import FromInstance
from headway.runtime.engine.protocol import EngineInfo, EngineSamples, OutputDelta


class InstanceEvents:
    """The `InstanceListener` of a cluster. What instances report about requests goes to `LiveController.messages`."""

    said: Callable[[int, FromInstance], None]
    heard: Callable[[int, OutputDelta], None]
    measured: Callable[[int], None]

    def __init__(self, fleet: InstanceRegistry, another: Another | None, is_lost: Callable[[], bool]) -> None:
        """another: see `InstanceRoster`. is_lost: whether no instance can serve, or come."""
        self._fleet, self._is_lost = fleet, is_lost
        self.roster = InstanceRoster(fleet, self, another)
        self._live: LiveController | None = None
        # Nothing can be about a request before there is a controller.
        self.said = lambda number, message: None
        self.heard = lambda number, delta: None
        self.measured = lambda number: None
        self._info: EngineInfo | None = None
        self._ready: dict[int, asyncio.Future[None]] = {}
        self.receive_samples: Callable[[int, EngineSamples], None] | None = None
        """Called with samples of instances' iterations."""

    async def all_ready(self) -> None:
        """Run all instances, and return when each is ready. Raises ConfigError when one has failed."""
        loop = asyncio.get_running_loop()
        self._ready = {each.number: loop.create_future() for each in self._fleet}
        for each in list(self._fleet):
            self.roster.look_after(each)
        await asyncio.gather(*self._ready.values())

    def begin(self, live: LiveController, info: EngineInfo) -> None:
        """Bring events before a controller from now on. info: what instances that join later have to agree with."""
        self._live, self._info = live, info
        self.said, self.heard, self.measured = live.messages.said, live.messages.heard, live.messages.measured
        live.messages.sampled = self.sampled

    def close(self) -> None:
        """End the tasks of all instances, and the wait for them."""
        for future in self._ready.values():
            if not future.done():
                future.set_exception(UnavailableError("the server is closing"))
                # Retrieved, or asyncio would log it if no caller awaits the start.
                future.exception()
        self.roster.stop()

    # -- the listener -------------------------------------------------------------------------------------------------

    def joined(self, number: int) -> None:
        """See `InstanceListener`."""
        ready = self._ready.get(number)
        if ready is not None and not ready.done():
            ready.set_result(None)
        if self._live is None:
            return
        if (why := self._differs(number)) is not None:
            self._fleet[number].fail(why)
            return
        self._live.membership.joined(number)

    def sampled(self, number: int, samples: EngineSamples) -> None:
        """See `InstanceListener`."""
        if self.receive_samples is not None:
            self.receive_samples(number, samples)

    def lost(self, number: int, why: str) -> None:
        """See `InstanceListener`."""
        if self._live is not None:
            membership = self._live.membership
            # Read before `lost`, which takes the number out of `leaving`.
            leaves = number in membership.leaving
            membership.lost(number, why)
            # Nothing is left on a lost instance: one that was being drained ends instead of restarting.
            if leaves:
                self._fleet[number].drain()

    def ended(self, number: int) -> None:
        """See `InstanceListener`."""
        instance = self._fleet[number]
        ready = self._ready.get(number)
        if ready is not None and not ready.done():
            ready.set_exception(ConfigError(f"instance {number}: {instance.failure or 'it ended while starting'}"))
        if instance.state == "left":
            self.roster.remove(instance)
        if self._live is not None and self._is_lost():
            requests = self._live.requests
            why = instance.failure or requests.not_placeable
            requests.fail_all(UnavailableError(f"no instance is left to serve: {why}", 30.0))

    def _differs(self, number: int) -> str | None:
        """Return why an instance that has joined cannot be part of this cluster; None: it can."""
        info, ours = self._fleet[number].info, self._info
        assert info is not None
        assert ours is not None
        try:
            merged_info([ours, info])
        except ConfigError as error:
            return str(error)
        longest = ours.max_model_len
        # Requests of up to that length have been accepted.
        if info.max_model_len < longest:
            return f"it holds requests of {info.max_model_len} tokens, and this cluster serves such of up to {longest}"
        return None
