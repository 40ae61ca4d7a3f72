"""Starting the processes of instances: each number has a folder for its sockets, each process names of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headway.engine.child import EngineChild
from headway.engine.config import EngineConfig, InstanceConfig
from headway.router.instance import Launch


def launcher(number: int, folder: Path, module: str = "headway.cli.engine_process") -> Launch:
    """Starts processes of instance `number`, one after another. `folder`: of the cluster, short enough for sockets."""
    own = folder / str(number)

    def launch(config: EngineConfig, incarnation: int) -> EngineChild:
        own.mkdir(exist_ok=True)
        instance = InstanceConfig(number=number, incarnation=incarnation, listen=f"unix:{own}/p{incarnation}")
        return EngineChild(msgspec.structs.replace(config, instance=instance), module, own, incarnation)

    return launch
