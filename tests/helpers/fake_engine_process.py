"""An engine process on the fake executor: the real service loop, no model. `config.model` says how it behaves.

fake: serves. beating: serves, and sends beats. broken: cannot start, and says why. silent: ends without a word. hangs:
stops while it starts. gives up: says so soon after it has started. garbles: what it says cannot be understood.
stumbles: the second of its kind cannot start. stuck: an iteration of its first never ends; beats do not stop.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec
from tests.helpers.engine_fixtures import INFO, make_core
from tests.helpers.fake_executor import FakeExecutor

from headway.core.batch import Batch
from headway.runtime.assembly.engine_process import child_of
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.service import EngineService

BLOCKS = 160_000
"""Room for a prompt of 1M tokens and more, in blocks of 16."""


class WallClock:
    def now(self) -> float:
        return time.monotonic()


class StuckExecutor(FakeExecutor):
    def submit(self, batch: Batch) -> None:
        if len(self.batches) == 5:
            time.sleep(3600.0)
        super().submit(batch)


def main(endpoint: str, server_pid: int, config: EngineConfig) -> int:
    if config.model == "silent":
        return 3
    clock = WallClock()
    service = EngineService(endpoint, clock, child_of(server_pid), config.channel_token)
    if config.model == "hangs":
        service.start_heartbeats(config.engine_timeout_s / 5)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGSTOP)
    if config.model == "stumbles" and endpoint.endswith("e1"):
        service.fail("the cache does not fit")
        service.close()
        return 1
    if config.model == "broken":
        service.fail("the checkpoint has no tensors")
        service.close()
        return 1
    info = msgspec.structs.replace(INFO, max_model_len=2_000_000, max_queued_requests=config.max_queued_requests)
    kind = StuckExecutor if config.model == "stuck" and endpoint.endswith("e0") else FakeExecutor
    core = make_core(kind(blocks=BLOCKS), info, max_num_seqs=512)
    core._clock = clock
    if config.model in ("beating", "stuck"):
        service.start_heartbeats(config.engine_timeout_s / 5)
    if config.model == "gives up":
        service._send(core.info)
        service.fail("worker 0 has ended too often")
        service.close()
        return 1
    if config.model == "garbles":
        service._send(core.info)
        service._socket.send(b"\xc1")
    service.run(core)
    service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)))
