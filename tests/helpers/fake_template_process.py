"""A template that forks engines over the fake executor.

`config.model` "broken": loading fails; "slow": it ends once there is the file `config.measured`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from tests.helpers.engine_fixtures import INFO, make_core
from tests.helpers.fake_engine_process import BLOCKS
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.polling import until

from headway.core.batch import ClockProtocol
from headway.core.errors import ConfigError
from headway.runtime.assembly.engine_process import IsWanted, MadeEngine, Make
from headway.runtime.assembly.template_process import live
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.service import EngineService


def preload(config: EngineConfig) -> Make:
    if config.model == "broken":
        raise ConfigError("the checkpoint has no tensors")

    if config.model == "slow":
        until(Path(config.measured or "").exists)

    def make(config: EngineConfig, clock: ClockProtocol, service: EngineService, is_wanted: IsWanted) -> MadeEngine:
        info = msgspec.structs.replace(INFO, max_model_len=2_000_000)
        core = make_core(FakeExecutor(blocks=BLOCKS), info, max_num_seqs=512)
        core._clock = clock
        return core, None

    return make


if __name__ == "__main__":
    live(preload, lambda: None)
