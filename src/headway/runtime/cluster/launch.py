"""Launchers of instances' processes: each instance has a folder for its sockets, each process names of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headway.runtime.cluster.live_instance import Launch
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.engine_child import EngineChild
from headway.runtime.launcher.engine_spawn import ENGINE
from headway.runtime.launcher.engine_template import EngineTemplate
from headway.runtime.launcher.ray_hosts import RayHosts
from headway.runtime.launcher.remote_engine import RemoteEngine


def launcher(
    number: int,
    folder: Path,
    module: str = ENGINE,
    kv_connector: str = "auto",
    template: EngineTemplate | None = None,
) -> Launch:
    """Starts processes of instance `number`, one after another. `folder`: of the cluster, short enough for sockets.
    template: what they are forked from; None: each is started anew."""
    own = folder / str(number)

    def launch(config: EngineConfig, incarnation: int) -> EngineChild:
        own.mkdir(exist_ok=True)
        instance = InstanceConfig(
            number=number, incarnation=incarnation, listen=f"unix:{own}/p{incarnation}", kv_connector=kv_connector
        )
        config = msgspec.structs.replace(config, instance=instance, measured=f"{own}/measured")
        return EngineChild(config, module, own, incarnation, template=template)

    return launch


def host_launcher(number: int, folder: Path, hosts: RayHosts, secret: str, kv_connector: str = "auto") -> Launch:
    """The same in a cluster of several hosts: on that one of them which `hosts` has for the number. Instances then
    speak to each other over TCP, and show that they know `secret`."""
    own = folder / str(number)

    def launch(config: EngineConfig, incarnation: int) -> EngineChild | RemoteEngine:
        instance = InstanceConfig(
            number=number,
            incarnation=incarnation,
            listen=f"tcp:{hosts.address}:0",
            secret=secret,
            kv_connector=kv_connector,
        )
        config = msgspec.structs.replace(config, instance=instance)
        if hosts.node_of(number):
            return RemoteEngine(config, number, hosts)
        own.mkdir(exist_ok=True)
        return EngineChild(msgspec.structs.replace(config, measured=f"{own}/measured"), ENGINE, own, incarnation)

    return launch
