"""Entry point of the engine process, which composes model, worker, scheduler and loop for `ProcessEngineClient`.

usage: python -m headway.runtime.assembly.engine_process ENDPOINT SERVER_PID < config.json
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from headway.core.batch import ClockProtocol
from headway.core.errors import HeadwayError, LostError
from headway.core.logs import setup
from headway.runtime.engine.config import EngineConfig, GaveUpError
from headway.runtime.engine.liveness import PER_TIMEOUT
from headway.runtime.engine.service import EngineService

log = logging.getLogger("headway.engine")

if TYPE_CHECKING:
    from headway.runtime.assembly.single_process import LoadedDecoder
    from headway.runtime.cluster.agent import InstanceAgent
    from headway.runtime.engine.core import EngineCore


class WallClock:
    """Seconds of CLOCK_MONOTONIC, which all processes of a host share: the server may subtract them."""

    def now(self) -> float:
        """Return the present in seconds."""
        return time.monotonic()


MadeEngine: TypeAlias = "tuple[EngineCore, InstanceAgent | None]"
IsWanted = Callable[[], bool]
"""Whether the server that an engine belongs to is still there."""
Make = Callable[[EngineConfig, ClockProtocol, EngineService, IsWanted], MadeEngine]
"""Makes an engine; in a cluster with its `InstanceAgent`."""


def real(
    config: EngineConfig,
    clock: ClockProtocol,
    service: EngineService,
    is_wanted: IsWanted,
    loaded: LoadedDecoder | None = None,
) -> MadeEngine:
    """Assemble an engine that computes, with its agent when it is an instance of a cluster. loaded: its model, where
    that is loaded already."""
    from headway.runtime.assembly.engine import assemble

    # An engine that waits for hosts gives up when it is no longer wanted.
    core = assemble(config, clock, is_wanted, loaded)
    if config.instance is None:
        return core, None
    from headway.runtime.assembly.instance import join

    return core, join(config, core, clock, service.wake)


def child_of(server_pid: int) -> IsWanted:
    """Return a check that this process is still a child of the server: an orphan gets another parent."""
    return lambda: os.getppid() == server_pid


def main(endpoint: str, is_wanted: IsWanted, config: EngineConfig, make: Make = real) -> int:
    """Serve until drained (returns 0), or until the engine cannot start or continue (returns 1)."""
    if hasattr(signal, "SIGINT"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole group; the server drains
    owner = {} if config.instance is None else {"instance": config.instance.number}
    setup(config.log_level, config.log_format, **owner)
    clock = WallClock()
    # TCP: the server is on another host, and the connection is authenticated by the token.
    elsewhere = endpoint.startswith("tcp:")
    service = EngineService(endpoint, clock, is_wanted, config.channel_token if elsewhere else None)
    # Before loading, which may take longer than the timeout.
    service.start_heartbeats(config.engine_timeout_s / PER_TIMEOUT)
    core: EngineCore | None = None
    try:
        core, member = make(config, clock, service, is_wanted)
        service.run(core, member)
    except Exception as error:
        service.fail(*_end(error, core is not None))
        return 1
    finally:
        if core is not None:
            core.close()
        service.close()
    return 0


def _end(error: Exception, ready: bool) -> tuple[str, bool]:
    """Return the error message for the server, and whether it is final (no restart).

    ready: the engine had started. Unexpected errors are logged with their stack trace.
    """
    if not ready and isinstance(error, HeadwayError):
        return str(error), True
    if isinstance(error, GaveUpError):
        return str(error), True
    if isinstance(error, LostError):  # expected: the server starts a new process
        log.warning("this engine ends: %s", error)
    else:
        log.exception("the engine cannot %s", "go on" if ready else "start")
    words = str(error) or type(error).__name__
    return (f"the engine failed: {words}", False) if ready else (f"the engine cannot start: {words}", True)


def live(make: Make = real) -> None:
    """Run the process: read command line and standard input, serve, and exit."""
    gc.disable()  # until the engine runs: collections beside imports take a tenth of a start
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    code = main(sys.argv[1], child_of(int(sys.argv[2])), config, make)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the teardown of torch's thread pools


if __name__ == "__main__":
    live()
