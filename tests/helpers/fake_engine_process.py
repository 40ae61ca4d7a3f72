"""The real life of an engine's process, or of a template that forks some, around the fake executor: no model.

`config.model` says what comes of it. fake: serves. silent: ends without a word. hangs: stops while it starts. foreseen:
cannot start, and knows why. unforeseen: cannot start, and does not. stumbles: the second of its kind cannot start.
bereft: loses a worker for good once it has started. puzzled: fails then in a way that nobody has foreseen. worn: has
lost workers too often. garbles: what it says cannot be understood. stuck: an iteration of its first never ends; beats
do not stop. slow: its template has loaded once there is the file `config.measured`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
from tests.helpers.engine_fixtures import INFO, make_core
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.polling import until

from headway.core.batch import Batch, ClockProtocol
from headway.core.errors import ConfigError, LostError
from headway.runtime.assembly import engine_process, template_process
from headway.runtime.assembly.engine_process import IsWanted, MadeEngine, Make
from headway.runtime.engine.config import EngineConfig, GaveUpError
from headway.runtime.engine.protocol import OutputDelta
from headway.runtime.engine.service import EngineService

NO_TENSORS = ConfigError("the checkpoint has no tensors")
LATER = {
    "bereft": LostError("worker 1 has ended with signal 9 (SIGKILL)"),
    "puzzled": ValueError("7 is no colour"),
    "worn": GaveUpError("the workers were lost 4 times in a row"),
}
BLOCKS = 160_000
"""Room for a prompt of 1M tokens and more, in blocks of 16."""


class StuckExecutor(FakeExecutor):
    def submit(self, batch: Batch) -> None:
        if len(self.batches) == 5:
            time.sleep(3600.0)
        super().submit(batch)


def make(config: EngineConfig, clock: ClockProtocol, service: EngineService, is_wanted: IsWanted) -> MadeEngine:
    """See `engine_process.Make`."""
    logging.getLogger("headway.engine").info("loading")
    life = sys.argv[1].rpartition("/")[2]
    if config.model == "silent":
        os._exit(3)
    if config.model == "hangs":
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGSTOP)
    if config.model == "stumbles" and life == "e1":
        raise ConfigError("the cache does not fit")
    if config.model == "foreseen":
        raise NO_TENSORS
    if config.model == "unforeseen":
        raise RuntimeError("the moon is full")
    info = msgspec.structs.replace(INFO, max_model_len=2_000_000, max_queued_requests=config.max_queued_requests)
    kind = StuckExecutor if config.model == "stuck" and life == "e0" else FakeExecutor
    core = make_core(kind(blocks=BLOCKS), info, max_num_seqs=512)
    core._clock = clock

    def step(wait_s: float | None = None) -> list[OutputDelta]:
        if config.model in LATER:
            raise LATER[config.model]
        service._socket.send(b"\xc1")
        return []

    if config.model in LATER or config.model == "garbles":
        core.step = step  # type: ignore[method-assign]
    return core, None


def preload(config: EngineConfig) -> Make:
    """See `template_process.Preload`."""
    if config.model == "foreseen":
        raise NO_TENSORS
    if config.model == "slow":
        until(Path(config.measured or "").exists)
    return make


if __name__ == "__main__":
    if len(sys.argv) == 2:
        template_process.live(preload, lambda: None)
    else:
        engine_process.live(make)
