"""The real life of an engine's process around a fake engine that comes to an end. `config.model` says to which.

foreseen: cannot start, and knows why. unforeseen: cannot start, and does not. bereft: loses a worker for good once it
has started. puzzled: fails then in a way that nobody has foreseen. worn: has lost workers too often.
"""

from __future__ import annotations

import logging

from tests.helpers.engine_fixtures import make_core

from headway.core.batch import ClockProtocol
from headway.core.errors import ConfigError, LostError
from headway.runtime.assembly.engine_process import IsWanted, live
from headway.runtime.engine.config import EngineConfig, GaveUpError
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import OutputDelta
from headway.runtime.engine.service import EngineService

LATER = {
    "bereft": LostError("worker 1 has ended with signal 9 (SIGKILL)"),
    "puzzled": ValueError("7 is no colour"),
    "worn": GaveUpError("the workers were lost 4 times in a row"),
}


def odd(
    config: EngineConfig, clock: ClockProtocol, service: EngineService, is_wanted: IsWanted
) -> tuple[EngineCore, None]:
    """What `live` starts."""
    logging.getLogger("headway.engine").info("loading")
    if config.model == "foreseen":
        raise ConfigError("the checkpoint has no tensors")
    if config.model == "unforeseen":
        raise RuntimeError("the moon is full")
    core = make_core()

    def step(wait_s: float | None = None) -> list[OutputDelta]:
        raise LATER[config.model]

    core.step = step  # type: ignore[method-assign]
    return core, None


if __name__ == "__main__":
    live(odd)
