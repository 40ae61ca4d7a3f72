"""The cluster as a policy sees it (`ClusterSnapshot`), and the state that it reads (`ClusterState`).

The controller keeps one `ClusterState` up to date. A `ClusterSnapshot` of it copies nothing, so that a decision over
thousands of instances costs only what it looks at.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from headway.core.errors import ConfigError
from headway.perf.hardware.links import NetworkLink

Role = Literal["prefill", "decode", "mixed"]


class ClusterInstance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model instance of `tp` × `stages` accelerators on a node."""

    id: int
    node: int
    role: Role = "mixed"
    tp: int = 1
    stages: int = 1
    capacity: int = 0
    """KV tokens that the instance can hold; 0: not stated."""
    free_at_s: float = 0.0
    """Predicted absolute time at which its committed spans and its scheduler's prefills will have ended; in the past:
    it is free. Corrected whenever something completes."""
    queued: int = 0
    """Prompt tokens that wait or run there."""
    used: int = 0
    """KV tokens in use there: leased by its scheduler and, in live clusters, of spans."""
    running: int = 0
    """Requests in its scheduler."""
    holder: str | None = None
    """Holder of the reservation on it (HoldGroup)."""


class ClusterLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Links that KV moves over between instances."""

    inside: NetworkLink
    """Between instances of one node."""
    across: NetworkLink
    """Between nodes (one network card an accelerator)."""

    def between(self, one: ClusterInstance, other: ClusterInstance) -> NetworkLink:
        """Return the link between two instances."""
        return self.inside if one.node == other.node else self.across


class ClusterState:
    """Instances by id (0, 1, …), with a version that rises with every change, and the times of recent arrivals."""

    def __init__(self, instances: Iterable[ClusterInstance], links: ClusterLinks, memory_s: float = 600.0) -> None:
        """`memory_s`: how long arrivals are remembered: the longest window of `ClusterSnapshot.arrival_rate_rps`."""
        self.instances: list[ClusterInstance] = list(instances)
        for index, instance in enumerate(self.instances):
            if instance.id != index:
                raise ConfigError(f"instance ids count from 0 without gaps; {instance.id} stands at place {index}")
        self.links = links
        self.version = 0
        self.changed_at = [0] * len(self.instances)  # version of each instance's last change
        nodes: dict[int, list[int]] = {}
        roles: dict[Role, list[int]] = {}
        for instance in self.instances:
            nodes.setdefault(instance.node, []).append(instance.id)
            roles.setdefault(instance.role, []).append(instance.id)
        self.by_node = {node: tuple(ids) for node, ids in sorted(nodes.items())}
        self.by_role = {role: tuple(ids) for role, ids in roles.items()}
        self.arrivals: list[float] = []
        self._memory_s = memory_s

    def put(self, instance: ClusterInstance) -> None:
        """Replace an instance's entry. The version rises only if it differs."""
        if self.instances[instance.id] == instance:
            return
        self.instances[instance.id] = instance
        self._changed(instance.id)

    def remove(self, instance: int) -> None:
        """Take an instance out of its role and node. Its entry stays, so that ids keep their meaning."""
        self.by_role = {role: tuple(i for i in ids if i != instance) for role, ids in self.by_role.items()}
        self.by_node = {node: tuple(i for i in ids if i != instance) for node, ids in self.by_node.items()}
        self._changed(instance)

    def add(self, instance: ClusterInstance) -> None:
        """Add an instance: a removed one under its id, or a new one with the next id (else ConfigError)."""
        i = instance.id
        if i == len(self.instances):
            self.instances.append(instance)
            self.changed_at.append(0)
        elif i > len(self.instances):
            raise ConfigError(f"instance ids count from 0 without gaps; {i} comes after {len(self.instances) - 1}")
        self.instances[i] = instance
        nodes, roles = dict(self.by_node), dict(self.by_role)
        nodes[instance.node] = tuple(sorted({*nodes.get(instance.node, ()), i}))
        roles[instance.role] = tuple(sorted({*roles.get(instance.role, ()), i}))
        self.by_node, self.by_role = dict(sorted(nodes.items())), roles
        self._changed(i)

    def arrived(self, at_s: float) -> None:
        """Record the arrival of a request. Times must not fall."""
        arrivals = self.arrivals
        arrivals.append(at_s)
        # trimmed only when half of it is too old: amortised constant time for each arrival
        if len(arrivals) > 1024 and arrivals[len(arrivals) // 2] < at_s - self._memory_s:
            del arrivals[: bisect_left(arrivals, at_s - self._memory_s)]

    def _changed(self, instance: int) -> None:
        self.version += 1
        self.changed_at[instance] = self.version


class ClusterSnapshot:
    """What a policy reads. Made for one event; the state behind it changes when the event has been handled."""

    __slots__ = ("_state", "now_s", "version")

    def __init__(self, state: ClusterState, now_s: float) -> None:
        self._state = state
        self.now_s = now_s
        self.version = state.version

    @property
    def instances(self) -> Sequence[ClusterInstance]:
        """All instances, by id."""
        return self._state.instances

    @property
    def by_node(self) -> Mapping[int, tuple[int, ...]]:
        """Ids of each node's instances, nodes in order."""
        return self._state.by_node

    @property
    def links(self) -> ClusterLinks:
        """Links between instances."""
        return self._state.links

    def with_role(self, *roles: Role) -> tuple[int, ...]:
        """Return ids of the instances of these roles, in order."""
        if len(roles) == 1:
            return self._state.by_role.get(roles[0], ())
        return tuple(sorted(i for role in roles for i in self._state.by_role.get(role, ())))

    def nodes_of(self, group: Iterable[int]) -> int:
        """Return how many nodes a group spans."""
        return len({self._state.instances[i].node for i in group})

    def ordered(self, group: Iterable[int]) -> tuple[int, ...]:
        """Return a group in the order in which its instances are acquired: by (node, id)."""
        return tuple(sorted(group, key=lambda i: (self._state.instances[i].node, i)))

    def arrival_rate_rps(self, window_s: float) -> float:
        """Return requests a second over the last `window_s`, or over the time since the first arrival where that is
        shorter (but at least a second)."""
        arrivals = self._state.arrivals
        if not arrivals:
            return 0.0
        # right after the start, a whole window would underestimate the rate
        since = max(self.now_s - window_s, arrivals[0])
        count = bisect_right(arrivals, self.now_s) - bisect_left(arrivals, since)
        return count / max(self.now_s - since, 1.0)

    def snapshot(self) -> tuple[ClusterInstance, ...]:
        """Return an immutable copy of the instances that may be kept."""
        return tuple(self._state.instances)
