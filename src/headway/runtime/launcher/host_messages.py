"""Messages between node 0 and the other hosts: desired and observed states, not commands. No torch.

Node 0 says, at least once a second, which ranks (in a cluster: which instances) a host shall run; the host says which
of them have ended. Whatever gets lost is said again, and both ends know from silence that the other is gone.
"""

from __future__ import annotations

import msgspec

PROTOCOL = 2
"""Raised with every change of these messages; a host of another number is refused."""


class HostHello(msgspec.Struct, frozen=True, array_like=True, tag="host"):
    """A host's first word, repeated until it is answered. `run`: random, new whenever it joins. `layout`, `nodes` and
    `model` must be node 0's own. `cores`, `available_bytes`: what it has to give. `trouble`: why it could run nothing,
    which node 0 is to know too."""

    protocol: int
    version: str
    node: int
    nodes: int
    run: str
    layout: str
    model: str
    cores: int
    available_bytes: int
    trouble: str = ""


class LaunchProcess(msgspec.Struct, frozen=True, array_like=True):
    """One process that shall run: rank (or instance) `rank`, which speaks to node 0 at `endpoint`. `serial` names it
    for good; `settings`: its RankConfig (or EngineConfig) as JSON."""

    serial: int
    rank: int
    endpoint: str
    settings: str


class DesiredState(msgspec.Struct, frozen=True, array_like=True, tag="keep"):
    """From node 0: run these and nothing else. `session`: this engine's; a new one knows nothing of older processes.
    When nothing is heard for `lost_s`, the other end is gone. `sent_s`: node 0's CLOCK_MONOTONIC."""

    session: str
    launches: tuple[LaunchProcess, ...]
    lost_s: float
    sent_s: float


class ProcessEnded(msgspec.Struct, frozen=True, array_like=True):
    """A process has ended: `why` continues the phrase 'worker 3 has ended with'."""

    serial: int
    why: str


class ObservedState(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """From a host: of what it was told to run, this has ended, and this is running as (serial, process id).

    `echo_s`: the `sent_s` that this answers at once, or 0; `now_s`: this host's CLOCK_MONOTONIC.
    """

    run: str
    session: str
    ended: tuple[ProcessEnded, ...]
    running: tuple[tuple[int, int], ...]
    echo_s: float
    now_s: float


class HostRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """From node 0: this host cannot join, and why."""

    why: str


class HostShutdown(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """From node 0: the instance ends in order; end too."""


class HostLeaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """From a host: it ends, as it was told to."""

    run: str


ToHost = DesiredState | HostRefused | HostShutdown
FromHost = HostHello | ObservedState | HostLeaving
