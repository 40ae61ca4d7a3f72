"""The engine process: composes model, worker, scheduler and loop. Started by `ProcessEngineClient`, not by people.

usage: python -m headway.cli.engine_process ENDPOINT SERVER_PID < config.json
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

import msgspec

from headway.core.errors import HeadwayError
from headway.engine.config import EngineConfig
from headway.engine.recovery import GaveUpError
from headway.engine.service import EngineService
from headway.parallel.beats import PER_TIMEOUT


class WallClock:
    """Seconds of CLOCK_MONOTONIC, which every process of this machine shares."""

    def now(self) -> float:
        return time.monotonic()


def main(endpoint: str, server_pid: int, config: EngineConfig) -> int:
    """Serve until drained (0) or unable to start (1)."""
    if hasattr(signal, "SIGINT"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    clock = WallClock()
    service = EngineService(endpoint, clock, server_pid)
    service.live(config.worker_timeout_s / PER_TIMEOUT)
    try:
        from headway.cli.assemble import assemble

        core = assemble(config, clock, lambda: os.getppid() == server_pid)
        member = None
        if config.instance is not None:
            from headway.cli.member import join

            member = join(config, core, clock, service.ring)
    except HeadwayError as error:
        service.fail(str(error))
        service.close()
        return 1
    try:
        service.run(core, member)
    except Exception as error:
        gave_up = isinstance(error, GaveUpError)
        if not gave_up:
            logging.getLogger("headway.engine").exception("the engine cannot go on")
        service.fail(str(error) if gave_up else f"the engine failed: {error}", final=gave_up)
        core.executor.close()
        service.close()
        return 1
    core.executor.close()
    service.close()
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's thread pools have nothing to say at exit
