"""What runs on another host, in an actor of Ray: it starts engines and ranks there, and reports how they end. No torch.

Processes are children of the actor and end with it. They import nothing of Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from headway import __version__
from headway.core.errors import HeadwayError
from headway.core.machine import CORES
from headway.perf.device import available_bytes
from headway.runtime.engine.config import EngineConfig
from headway.runtime.executor.plans import RankConfig
from headway.runtime.launcher.network import address_towards, spawn
from headway.runtime.launcher.rank_launcher import RANK, end_words
from headway.runtime.model.config import identity

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
        self._running: dict[int, subprocess.Popen[bytes]] = {}
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
            ranks = msgspec.structs.replace(msgspec.json.decode(launch.settings, type=RankConfig), model=self._model)
            process = spawn(launch.endpoint, ranks, RANK, str(launch.number))
        else:
            process = spawn(launch.endpoint, self._engine_config(launch.settings), launch.module)
        self._running[launch.serial] = process
        if launch.serial in self._ended:
            _kill(process)
        return process.pid

    async def wait(self, serial: int) -> str:
        """Return how a process has ended, once it has: a phrase that follows 'has ended with'."""
        # Started by an earlier process of the actor, which it ended with.
        if (process := self._running.get(serial)) is None:
            return "what had started it"
        while (code := process.poll()) is None:
            await asyncio.sleep(_POLL_S)
        # Its workers end with it; one that is stopped might not.
        _kill(process)
        del self._running[serial]
        return end_words(code)

    async def end(self, serial: int) -> None:
        """Kill a process and all that it has started, now or as soon as it is started."""
        self._ended.add(serial)
        if (process := self._running.get(serial)) is not None:
            _kill(process)

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


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
