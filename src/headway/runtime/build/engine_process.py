"""The engine process: composes model, worker, scheduler and loop. Started by `ProcessEngineClient`, not by people.

usage: python -m headway.runtime.build.engine_process ENDPOINT SERVER_PID < config.json
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headway.core.clock import ClockProtocol
from headway.core.errors import HeadwayError, LostError
from headway.core.structured_log import setup
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.restart_limits import GaveUpError
from headway.runtime.engine.service import EngineService
from headway.runtime.launcher.heartbeat import PER_TIMEOUT

log = logging.getLogger("headway.engine")

if TYPE_CHECKING:
    from headway.runtime.cluster.instance_agent import InstanceAgent
    from headway.runtime.engine.core import EngineCore


class WallClock:
    """Seconds of CLOCK_MONOTONIC, which every process of this machine shares."""

    def now(self) -> float:
        return time.monotonic()


Make = Callable[[EngineConfig, ClockProtocol, EngineService, int], "tuple[EngineCore, InstanceAgent | None]"]
"""Settings, a clock, the service and the server's process to an engine, and what makes it an instance of a cluster."""


def real(
    config: EngineConfig, clock: ClockProtocol, service: EngineService, server_pid: int
) -> tuple[EngineCore, InstanceAgent | None]:
    """An engine that computes."""
    from headway.runtime.build.engine import assemble

    core = assemble(config, clock, lambda: os.getppid() == server_pid)
    if config.instance is None:
        return core, None
    from headway.runtime.build.instance import join

    return core, join(config, core, clock, service.wake)


def main(endpoint: str, server_pid: int, config: EngineConfig, make: Make = real) -> int:
    """Serve until drained (0) or unable to start or go on (1)."""
    if hasattr(signal, "SIGINT"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    owner = {} if config.instance is None else {"instance": config.instance.number}
    setup(config.log_level, config.log_format, **owner)
    clock = WallClock()
    elsewhere = endpoint.startswith("tcp:")
    service = EngineService(endpoint, clock, server_pid, config.rdzv_token if elsewhere else None)
    service.start_heartbeats(config.worker_timeout_s / PER_TIMEOUT)
    core: EngineCore | None = None
    try:
        core, member = make(config, clock, service, server_pid)
        service.run(core, member)
    except Exception as error:
        service.fail(*_end(error, core is not None))
        return 1
    finally:
        if core is not None:
            core.executor.close()
        service.close()
    return 0


def _end(error: Exception, ready: bool) -> tuple[str, bool]:
    """The error for the server, and whether it is final. ready: the engine had started. Unforeseen errors are logged
    with
    their trace."""
    if not ready and isinstance(error, HeadwayError):
        return str(error), True
    if isinstance(error, GaveUpError):
        return str(error), True
    if isinstance(error, LostError):  # a new process is the remedy
        log.warning("this engine ends: %s", error)
    else:
        log.exception("the engine cannot %s", "go on" if ready else "start")
    words = str(error) or type(error).__name__
    return (f"the engine failed: {words}", False) if ready else (f"the engine cannot start: {words}", True)


def live(make: Make = real) -> None:
    """All of a process's life, from its command line and input to its end."""
    code = main(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig), make)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's thread pools have nothing to say at exit


if __name__ == "__main__":
    live()
