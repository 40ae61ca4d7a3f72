"""The cluster as a policy sees it, and the book that it is read from.

Whoever drives a policy keeps a `ClusterState` up to date; a `ClusterSnapshot` of it costs nothing to make, so that a
decision over thousands of instances costs what it looks at. Policies with an index of their own ask what has changed
since the version that they know.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from headway.core.errors import ConfigError
from headway.perf.hardware.links import NetworkLink

Role = Literal["prefill", "decode", "mixed"]


class ClusterInstance(msgspec.Struct, frozen=True, kw_only=True):
    """One model instance of `tp` × `stages` accelerators on a node.

    capacity: KV tokens that it holds; used: of those that are leased by its scheduler. free_at_s: when all spans that
    are committed to it will have ended and its scheduler's waiting prefills too, an absolute time, predicted, and
    anchored anew whenever something completes (in the past: it is free). queued: prompt tokens that wait or run there.
    running: requests in its scheduler. holder: who holds it.
    """

    id: int
    node: int
    role: Role = "mixed"
    tp: int = 1
    stages: int = 1
    capacity: int = 0
    free_at_s: float = 0.0
    queued: int = 0
    used: int = 0
    running: int = 0
    holder: str | None = None


class ClusterLinks(msgspec.Struct, frozen=True, kw_only=True):
    """What instances move KV over: inside a node, and across nodes (one card an accelerator)."""

    inside: NetworkLink
    across: NetworkLink

    def between(self, one: ClusterInstance, other: ClusterInstance) -> NetworkLink:
        return self.inside if one.node == other.node else self.across


class ClusterState:
    """Instances by id (0, 1, …), with a version that rises with every change, and the times of recent arrivals."""

    def __init__(self, instances: Iterable[ClusterInstance], links: ClusterLinks, memory_s: float = 600.0) -> None:
        """`memory_s`: how long arrivals are remembered, the longest window of a rate."""
        self.instances: list[ClusterInstance] = list(instances)
        for index, instance in enumerate(self.instances):
            if instance.id != index:
                raise ConfigError(f"instance ids count from 0 without gaps; {instance.id} stands at place {index}")
        self.links = links
        self.version = 0
        self.changed_at = [0] * len(self.instances)
        nodes: dict[int, list[int]] = {}
        roles: dict[Role, list[int]] = {}
        for instance in self.instances:
            nodes.setdefault(instance.node, []).append(instance.id)
            roles.setdefault(instance.role, []).append(instance.id)
        self.by_node = {node: tuple(ids) for node, ids in sorted(nodes.items())}
        self.by_role = {role: tuple(ids) for role, ids in roles.items()}
        self.arrivals: list[float] = []
        self._memory_s = memory_s
        self._journal: deque[tuple[int, int]] = deque(maxlen=4 * len(self.instances) + 64)

    def put(self, instance: ClusterInstance) -> None:
        """Replace what is known of an instance. No change, no new version."""
        if self.instances[instance.id] == instance:
            return
        self.version += 1
        self.instances[instance.id] = instance
        self.changed_at[instance.id] = self.version
        self._journal.append((self.version, instance.id))

    def remove(self, instance: int) -> None:
        """It is gone for good: no role and no node has it any more. Its place stays, so that ids keep their meaning."""
        self.by_role = {role: tuple(i for i in ids if i != instance) for role, ids in self.by_role.items()}
        self.by_node = {node: tuple(i for i in ids if i != instance) for node, ids in self.by_node.items()}
        self.version += 1
        self.changed_at[instance] = self.version
        self._journal.append((self.version, instance))

    def add(self, instance: ClusterInstance) -> None:
        """It is there: one that was removed, with its id, or a new one with the next id."""
        i = instance.id
        if i == len(self.instances):
            self.instances.append(instance)
            self.changed_at.append(0)
            self._journal = deque(self._journal, maxlen=4 * len(self.instances) + 64)
        elif i > len(self.instances):
            raise ConfigError(f"instance ids count from 0 without gaps; {i} comes after {len(self.instances) - 1}")
        self.instances[i] = instance
        nodes, roles = dict(self.by_node), dict(self.by_role)
        nodes[instance.node] = tuple(sorted({*nodes.get(instance.node, ()), i}))
        roles[instance.role] = tuple(sorted({*roles.get(instance.role, ()), i}))
        self.by_node, self.by_role = dict(sorted(nodes.items())), roles
        self.version += 1
        self.changed_at[i] = self.version
        self._journal.append((self.version, i))

    def arrived(self, at_s: float) -> None:
        """A request came. Times must not fall."""
        arrivals = self.arrivals
        arrivals.append(at_s)
        if len(arrivals) > 1024 and arrivals[len(arrivals) // 2] < at_s - self._memory_s:
            del arrivals[: bisect_left(arrivals, at_s - self._memory_s)]

    def changed_since(self, version: int) -> set[int] | None:
        """Ids that have changed after `version`; None when that is too long ago to tell (look at all)."""
        journal = self._journal
        if version >= self.version:
            return set()
        if not journal or (journal[0][0] > version + 1 and len(journal) == journal.maxlen):
            return None
        found = set()
        for at, instance in reversed(journal):
            if at <= version:
                break
            found.add(instance)
        return found


class ClusterSnapshot:
    """What a policy reads. Made for one event; the book may change when the event has been handled."""

    __slots__ = ("_book", "now_s", "version")

    def __init__(self, book: ClusterState, now_s: float) -> None:
        self._book = book
        self.now_s = now_s
        self.version = book.version

    @property
    def instances(self) -> Sequence[ClusterInstance]:
        """By id."""
        return self._book.instances

    @property
    def by_node(self) -> Mapping[int, tuple[int, ...]]:
        """Ids by node, nodes in order."""
        return self._book.by_node

    @property
    def links(self) -> ClusterLinks:
        return self._book.links

    def with_role(self, *roles: Role) -> tuple[int, ...]:
        """Ids of instances of these roles, in order."""
        if len(roles) == 1:
            return self._book.by_role.get(roles[0], ())
        return tuple(sorted(i for role in roles for i in self._book.by_role.get(role, ())))

    def nodes_of(self, group: Iterable[int]) -> int:
        """How many nodes a group spans."""
        return len({self._book.instances[i].node for i in group})

    def ordered(self, group: Iterable[int]) -> tuple[int, ...]:
        """A group in the order in which its instances are acquired: by (node, id)."""
        return tuple(sorted(group, key=lambda i: (self._book.instances[i].node, i)))

    def arrival_rate_rps(self, window_s: float) -> float:
        """Requests a second over the last `window_s`, or over the time since the first arrival where that is shorter
        (but at least a second)."""
        arrivals = self._book.arrivals
        if not arrivals:
            return 0.0
        since = max(self.now_s - window_s, arrivals[0])
        count = bisect_right(arrivals, self.now_s) - bisect_left(arrivals, since)
        return count / max(self.now_s - since, 1.0)

    def changed_since(self, version: int) -> set[int] | None:
        """See `ClusterState.changed_since`."""
        return self._book.changed_since(version)

    def snapshot(self) -> tuple[ClusterInstance, ...]:
        """An immutable copy of the instances, to keep: one reference an instance."""
        return tuple(self._book.instances)
