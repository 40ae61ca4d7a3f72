"""What numerical libraries are told before they load, unless the user's environment says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from headway.core.cores import CORES, shares
from headway.engine.config import EngineConfig

NUMERICS = {
    # Threads spin for some microseconds and then sleep while they wait for each other. Spinning on, as is the default,
    # makes a prefill three times slower as soon as one other process is busy on two cores; not spinning at all doubles
    # the time of a decode step on an idle machine.
    "GOMP_SPINCOUNT": "1000",
    # oneDNN keeps about 1.6 MB a shape of matrix product, for 1,024 shapes; chunks have any number of rows.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}
"""Environment variables of a process that computes. They only work when set before torch is imported."""


_CHOSEN = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def bound(config: EngineConfig) -> dict[str, str]:
    """What binds the threads of an engine that computes in its own process, each to its share of the cores.

    Linux wakes a team that has slept for 100 ms or more on one core, and leaves it there for as long as a short prefill
    takes: 77 ms in place of 51 for 320 tokens, on two cores. Other threads of the process are started by
    `core.cores.start`. Nothing where one thread computes, or more than there are cores, or workers do, or the user's
    environment says how to bind.
    """
    count = config.threads or int(os.environ.get("OMP_NUM_THREADS") or len(CORES))
    degrees = config.tensor_parallel_size, config.pipeline_parallel_size, config.kv_parallel_size
    if degrees != (1, 1, 1) or not 2 <= count <= len(CORES) or any(name in os.environ for name in _CHOSEN):
        return {}
    places = ",".join("{" + ",".join(map(str, share)) + "}" for share in shares(count))
    return {"OMP_PROC_BIND": "true", "OMP_PLACES": places}


def settle(more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Apply `NUMERICS`, and `more`, to this process, for commands that compute in their own."""
    for name, value in {**NUMERICS, **more}.items():
        os.environ.setdefault(name, value)
