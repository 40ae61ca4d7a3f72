"""The other hosts of an instance or a cluster: nodes of a Ray cluster, which starts and watches processes. No torch.

One placement group has a bundle on each host but this one, and one actor in each bundle (`HostActor`) starts engines
and ranks there, which are its children, end with it and import nothing of Ray, and reports how they end. When a node is
lost, Ray moves its bundle to another node, or waits for one, and restarts the actor there. Ray's token authentication
guards all of it; the processes' own connections have keys that travel through Ray.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from typing_extensions import override

from headway import __version__
from headway.core.errors import ConfigError, HeadwayError
from headway.core.machine import CORES
from headway.perf.device import available_bytes
from headway.runtime.engine.config import EngineConfig
from headway.runtime.executor.plans import RankConfig
from headway.runtime.launcher.processes import (
    ENGINE,
    RANK,
    ProcessHandle,
    SpawnedProcess,
    address_towards,
    guard_server,
    new_token,
    spawn,
)
from headway.runtime.model.config import identity

log = logging.getLogger("headway.engine")

_POLL_S = 0.05
"""Interval between two looks for the end of a process."""


class HostFacts(NamedTuple):
    """What a host contributes, and what must be the same on all."""

    version: str
    model: str
    """`identity` of its model folder; empty where that cannot be read."""
    trouble: str
    """Why the model folder cannot be read; empty where it can."""
    cores: int
    available_bytes: int


class ProcessLaunch(NamedTuple):
    """One process to be started on another host."""

    serial: int
    """Names the process for good."""
    number: int
    """Number of the instance or of the rank."""
    endpoint: str
    """Where its server or engine listens."""
    settings: bytes
    """An EngineConfig, or a RankConfig, as JSON."""
    module: str
    """Python module that the process runs."""


class HostActor:
    """Starts processes on its host. An asynchronous actor: calls run concurrently on one event loop.

    model: the checkpoint's folder. node0: address of the host that speaks to the processes.
    """

    def __init__(self, model: str, node0: str) -> None:
        self._node0 = node0
        self._model = model
        self._running: dict[int, SpawnedProcess] = {}
        self._ended: set[int] = set()
        """Serials that were told to end, perhaps before they were started."""
        # Ray's workers give way to all else on their host (nice 15); ranks on host 0 do not, and wait for those here.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)

    async def facts(self) -> HostFacts:
        """Describe this host."""
        return host_facts(self._model)

    async def now(self) -> float:
        """Return this host's CLOCK_MONOTONIC in seconds."""
        return time.monotonic()

    async def start(self, launch: ProcessLaunch) -> int:
        """Start a process; return its id. Raises OSError."""
        if launch.module == RANK:
            ranks = msgspec.json.decode(launch.settings, type=RankConfig)
            ranks = msgspec.structs.replace(ranks, engine=msgspec.structs.replace(ranks.engine, model=self._model))
            process = spawn(launch.endpoint, ranks, RANK, str(launch.number))
        else:
            process = spawn(launch.endpoint, self._engine_config(launch.settings), launch.module)
        self._running[launch.serial] = process
        if launch.serial in self._ended:
            process.kill()
        assert process.pid is not None
        return process.pid

    async def wait(self, serial: int) -> str:
        """Return how a process has ended, once it has (`ProcessHandle.ended`)."""
        # Started by an earlier process of the actor, which it ended with.
        if (process := self._running.get(serial)) is None:
            return "has ended with what had started it"
        while (how := process.ended) is None:
            await asyncio.sleep(_POLL_S)
        # Its workers end with it; one that is stopped might not.
        process.kill()
        del self._running[serial]
        return how

    async def end(self, serial: int) -> None:
        """Kill a process and all that it has started, now or as soon as it is started."""
        self._ended.add(serial)
        if (process := self._running.get(serial)) is not None:
            process.kill()

    def _engine_config(self, settings: bytes) -> EngineConfig:
        """Return an engine's settings on this host: its copy of the model, and an address that others reach."""
        config = msgspec.structs.replace(msgspec.json.decode(settings, type=EngineConfig), model=self._model)
        if config.instance is None:
            return config
        own = msgspec.structs.replace(config.instance, listen=f"tcp:{address_towards(self._node0)}:0")
        return msgspec.structs.replace(config, instance=own)


def host_facts(model: str) -> HostFacts:
    """Describe this host. model: the checkpoint's folder."""
    mark = trouble = ""
    try:
        mark = identity(Path(model))
    except HeadwayError as error:
        trouble = str(error)
    return HostFacts(__version__, mark, trouble, len(CORES), available_bytes())


def mismatch(mine: HostFacts, theirs: HostFacts) -> str | None:
    """Return why a host cannot serve together with this one; None when it can."""
    if theirs.version != mine.version:
        return f"it runs Headway {theirs.version}, and this host {mine.version}: install the same version on all hosts"
    if theirs.trouble:
        return theirs.trouble
    if theirs.model != mine.model:
        return f"its model folder holds another model ({theirs.model}) than this host's ({mine.model})"
    return None


_RETRY_S = 0.5
_TURN_S = 0.2
"""After how long a thread that waits for Ray looks whether it shall end."""
_JOIN_S = 5.0
_CLOCK_S = 30.0
"""Interval between two measurements of a host's clock."""
_PINGS = 5
_KEEP_DEVICES = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
"""The processes choose among the devices that a host has, not the actor."""


class RemoteProcess(ProcessHandle):
    """A process on another host. Made by `RayHosts.launch`. Safe between threads."""

    local = False

    def __init__(self, number: int, node: int, drop: Callable[[], None]) -> None:
        self.node = node
        self.name = f"process {number} on host {node}"
        self._how: str | None = None
        self.sentinel, self._held = os.pipe()
        self._changed = threading.Condition()
        self._drop = drop
        weakref.finalize(self, os.close, self.sentinel)

    @property
    @override
    def ended(self) -> str | None:
        return self._how

    def record_end(self, how: str) -> None:
        """Record that it is gone."""
        with self._changed:
            if self._how is None:
                self._how = how
                os.close(self._held)
                self._changed.notify_all()

    @override
    def join(self, timeout_s: float | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._how is not None, timeout_s)

    @override
    def kill(self) -> None:
        if self._how is None:
            self.record_end("was told to end")
            self._drop()


class _RayLeftError(Exception):
    """`RayHosts.close` has been called: what a thread waits for does not matter any more."""


class RayHosts:
    """The nodes of a Ray cluster on which processes of this one run, until `close`. Made by `join_ray`.

    ray: the module. actors: one `HostActor` for each host but this one, which is host 0; they exist once `ready` does.
    address: of this host, for the others. node_of: the host of a rank's or an instance's number. model: the
    checkpoint's folder. patience_s: how long to wait for hosts, at first and when one is lost.
    """

    def __init__(
        self,
        ray: Any,
        actors: Sequence[Any],
        ready: Any,
        address: str,
        node_of: Callable[[int], int],
        model: str,
        patience_s: float,
    ) -> None:
        self._ray, self._actors, self._ready = ray, actors, ready
        self.address, self.node_of = address, node_of
        self._model, self._patience_s = model, patience_s
        self.token = new_token()
        """Authenticates connections between the hosts' processes."""
        self._ahead_s = [0.0] * (1 + len(actors))
        self._serials = itertools.count(1)
        self._processes: weakref.WeakSet[RemoteProcess] = weakref.WeakSet()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._calling = threading.Lock()
        """Held by whatever calls an actor without waiting, so that `close` does not come in between."""
        self._closing = False

    def gather(self, wanted: Callable[[], bool] = lambda: True) -> list[HostFacts]:
        """Return the facts of all hosts, by number, once Ray has a node for each; log every 10 s what is waited for.

        Raises ConfigError after `patience_s`, when `wanted` returns False, or when a host does not match this one.
        """
        began = told = time.monotonic()
        count = len(self._actors)
        while not self._ray.wait([self._ready], timeout=_RETRY_S)[0]:
            now = time.monotonic()
            if now - began > self._patience_s or not wanted():
                raise ConfigError(
                    f"Ray has no {count} nodes with a free CPU beside this one within {self._patience_s:g} s: `ray "
                    "status` lists what there is"
                )
            if now - told >= 10.0:
                told = now
                left = self._patience_s - (now - began)
                log.warning("waiting for %d nodes of Ray beside this one; %.0f s left", count, left)
        mine = host_facts(self._model)
        facts: list[HostFacts] = self._ray.get([each.facts.remote() for each in self._actors])
        for node, theirs in enumerate(facts, 1):
            if (why := mismatch(mine, theirs)) is not None:
                raise ConfigError(f"host {node} cannot take part: {why}")
        return [mine, *facts]

    def open(self, socket: Any) -> str:
        """Bind a socket on this host's address for processes with `token`; return its endpoint."""
        guard_server(socket, self.token)
        port = socket.bind_to_random_port(f"tcp://{self.address}")
        return f"tcp://{self.address}:{port}"

    def launch(self, number: int, endpoint: str, settings: bytes, module: str = ENGINE) -> RemoteProcess | None:
        """Have a process run on its host, as soon as that is there; None for host 0, whose processes are children.

        endpoint: where the process finds its server; settings: its EngineConfig or RankConfig as JSON.
        """
        node = self.node_of(number)
        if node == 0:
            return None
        launch = ProcessLaunch(next(self._serials), number, endpoint, settings, module)
        process = RemoteProcess(number, node, lambda: self._end_there(node, launch))
        self._processes.add(process)
        thread = threading.Thread(target=self._follow, args=(process, launch), name=process.name, daemon=True)
        self._threads.add(thread)
        thread.start()
        return process

    def ahead_s(self, number: int) -> float:
        """Return the seconds to add to the clock of that number's host to have this one's."""
        return self._ahead_s[self.node_of(number)]

    def close(self) -> None:
        """End what runs on the other hosts, and leave the Ray cluster. Harmless when repeated."""
        with self._calling:
            if self._closing:
                return
            self._closing = True
        for process in list(self._processes):
            process.record_end("was told to end")
        # A thread that calls Ray after its shutdown ends this process with status 1.
        until = time.monotonic() + _JOIN_S
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))
        # The driver's actors and placement groups end with its connection, and their processes with the actors.
        self._ray.shutdown()

    # -- a thread for each process ------------------------------------------------------------------------------

    def _follow(self, process: RemoteProcess, launch: ProcessLaunch) -> None:
        """Start the process, wait for its end, and record that."""
        try:
            if self._started(process, launch):
                process.record_end(f"(on host {process.node}) {self._end(process, launch)}")
        except (OSError, self._ray.exceptions.RayTaskError) as error:
            process.record_end(f"(on host {process.node}) cannot be started: {getattr(error, 'cause', error)}")
        except _RayLeftError:
            process.record_end("was told to end")
        except Exception as error:
            log.debug("%s: %s", process.name, error)
            process.record_end(f"was on host {process.node}, which is lost")
            # If the actor can be reached again, its process shall not stay.
            self._end_there(process.node, launch)

    def _call(self, node: int, method: str, *words: object) -> Any:
        """Call an actor's method; return Ray's reference to its result. Raises _RayLeftError after `close`."""
        with self._calling:
            if self._closing:
                raise _RayLeftError
            return getattr(self._actors[node - 1], method).remote(*words)

    def _end_there(self, node: int, launch: ProcessLaunch) -> None:
        """Have a process on another host ended; not waited for."""
        with suppress(_RayLeftError):
            self._call(node, "end", launch.serial)

    def _is_done(self, pending: Any, timeout_s: float) -> bool:
        """Wait for a result for so many seconds. Raises _RayLeftError soon after `close`."""
        until = time.monotonic() + timeout_s
        while not self._closing:
            left_s = until - time.monotonic()
            if self._ray.wait([pending], timeout=max(0.0, min(left_s, _TURN_S)))[0]:
                return True
            if left_s <= 0:
                return False
        raise _RayLeftError

    def _result(self, node: int, method: str, *words: object) -> Any:
        """Call an actor's method and wait for what it returns. Raises _RayLeftError, Ray's errors and the method's."""
        pending = self._call(node, method, *words)
        self._is_done(pending, math.inf)
        return self._ray.get(pending)

    def _started(self, process: RemoteProcess, launch: ProcessLaunch) -> bool:
        """Start the process once its host is there; False where it is not wanted any more, or no host came in time."""
        until = time.monotonic() + self._patience_s
        while process.ended is None:
            try:
                process.pid = self._result(process.node, "start", launch)
                return True
            except self._ray.exceptions.RayTaskError:
                raise
            except self._ray.exceptions.RayError as error:
                if time.monotonic() > until:
                    process.abandoned = True
                    process.record_end(
                        f"was on host {process.node}, which has not come back for {self._patience_s:g} s"
                    )
                    return False
                log.debug("%s cannot be started yet: %s", process.name, error)
                time.sleep(_RETRY_S)
        return False

    def _end(self, process: RemoteProcess, launch: ProcessLaunch) -> str:
        """Wait for the process's end; return how it ended. Measures its host's clock meanwhile."""
        ending = self._call(process.node, "wait", launch.serial)
        self._measure_clock(process.node)
        while not self._is_done(ending, _CLOCK_S):
            self._measure_clock(process.node)
        why: str = self._ray.get(ending)
        return why

    def _measure_clock(self, node: int) -> None:
        """As NTP does: the other clock is read in the middle of a round trip; the shortest trip is most exact."""
        trips = []
        for _ in range(_PINGS):
            began = time.monotonic()
            theirs: float = self._result(node, "now")
            trip = time.monotonic() - began
            trips.append((trip, began + trip / 2 - theirs))
        self._ahead_s[node] = min(trips)[1]


def join_ray(
    address: str, count: int, node_of: Callable[[int], int], model: str, patience_s: float, devices: int = 0
) -> RayHosts:
    """Join the Ray cluster at `address`, of which this host is a node, and reserve hosts.

    count: hosts, this one included. devices: GPUs of each other host that are reserved. The rest: see `RayHosts`.
    Raises ConfigError.
    """
    ray = _connected(address)
    from ray.util import get_node_ip_address
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    here, model = str(get_node_ip_address()), os.path.abspath(model)
    own = ray.get_runtime_context().get_node_id()
    bundle = {"CPU": 1.0} | ({"GPU": float(devices)} if devices else {})
    group = placement_group(
        [bundle] * (count - 1),
        strategy="STRICT_SPREAD",
        bundle_label_selector=[{"ray.io/node-id": f"!{own}"}] * (count - 1),
    )
    actor = ray.remote(HostActor)
    actors = [
        actor.options(
            num_cpus=0,
            max_restarts=-1,
            runtime_env=_KEEP_DEVICES if devices else None,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
        ).remote(model, here)
        for i in range(count - 1)
    ]
    return RayHosts(ray, actors, group.ready(), here, node_of, model, patience_s)


def node_of(rank: int, nodes: int, ranks: int) -> int:
    """Return a rank's host: ranks fill host 0 first, then host 1, so that those of one stage are together."""
    return rank * nodes // ranks


def _connected(address: str) -> Any:
    """Join the Ray cluster at `address` as a driver; return the module. Raises ConfigError."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "several hosts need Ray: `pip install 'headway[ray]'` and `ray start` on each of them "
            "(docs/how-to/several-hosts.md)"
        ) from error
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, ignore_reinit_error=True, logging_level=logging.WARNING)
    except Exception as error:
        raise ConfigError(f"no Ray cluster can be joined at ray-address {address}: {error}") from error
    finally:
        # Ray sets a handler of its own, which would keep this process from ending in order.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    return ray
