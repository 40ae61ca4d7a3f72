"""What can happen to a rank's process, done to real ones; and serving that goes on through it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.rank_processes import make_rank_config
from tests.helpers.rank_serving import Ask, make_core, serve

from headway.runtime.engine.config import RestartLimit
from headway.runtime.engine.core import EngineCore
from headway.runtime.executor.multi_process import MultiProcessExecutor, ProcessTransport
from headway.runtime.executor.plans import RankConfig

BLOCKS, BLOCK = 128, 8
TIMEOUT_S = 1.5
_PIDFD_GETFD = 438


def rank_config(folder: Path, tp: int, stages: int, kvp: int = 1) -> RankConfig:
    return make_rank_config(folder, tp, stages, kvp=kvp, kv_blocks=BLOCKS, patience_s=30.0, timeout_s=TIMEOUT_S)


class World:
    """Ranks that start again when they are lost. `pids` are those of the newest."""

    def __init__(self, config: RankConfig) -> None:
        self.config = config
        self.wires: list[ProcessTransport] = []
        self.executor = MultiProcessExecutor(self.wire(), config.layout, config.kv_blocks, self.wire)

    def wire(self) -> ProcessTransport:
        wire = ProcessTransport(self.config)
        self.wires.append(wire)
        wire.start()
        return wire

    @property
    def pids(self) -> list[int]:
        return [int(process.pid or 0) for process in self.wires[-1].processes]

    def core(self, losses: int = 100, **scheduler: Any) -> EngineCore:
        layout = self.config.layout
        core = make_core(self.executor, BLOCKS, BLOCK, stages=layout.stages, kv_parallel=layout.kvp, **scheduler)
        # A scheduler numbers its groups of decodes anew, and the ranks remember those of the one before.
        builders = [core.scheduler, *getattr(core.scheduler, "groups", ())]
        for builder in filter(None, (getattr(each, "builder", None) for each in builders)):
            builder._epochs = self.executor.plans
        core._restarts = RestartLimit(losses, "the workers")
        core.info = msgspec.structs.replace(core.info, max_model_len=BLOCKS * BLOCK)
        return core


@contextmanager
def world(config: RankConfig) -> Iterator[World]:
    made = World(config)
    try:
        yield made
    finally:
        made.executor.close()
        for wire in made.wires:
            assert all(not process.is_alive() for process in wire.processes)
            assert not Path(wire._directory).exists()


OnStep = Callable[[dict[str, list[int]]], None]


def serve_through(core: EngineCore, asks: list[Ask], on_step: OnStep) -> list[list[int]]:
    """All answers. `on_step` sees what has been told before every step, and may do harm."""
    return serve(core, asks, wait_s=1.0, on_step=on_step)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def hang(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def cut(pid: int) -> None:
    """End every connection of a process, to the engine and to other ranks: both sides see it closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(entry).startswith("socket:"):
                    copy = libc.syscall(_PIDFD_GETFD, process, int(entry.name), 0)
                    if copy < 0 and ctypes.get_errno() == 1:
                        pytest.skip("this system does not let a test take a child's sockets (pidfd_getfd: EPERM)")
                    if copy >= 0:
                        with socket.socket(fileno=copy) as taken:
                            taken.shutdown(socket.SHUT_RDWR)
    except FileNotFoundError:
        pass
    finally:
        os.close(process)


FAULTS = {"killed": kill, "hung": hang, "cut off": cut}
