"""The roster of a cluster's instances, for its operators: list them, add one, remove one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from headway.core.errors import RequestError, UnavailableError
from headway.runtime.cluster.cluster_report import InstanceReport
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.live_instance import InstanceListener, LiveInstance
from headway.runtime.cluster.membership import LiveMembership
from headway.runtime.engine.cumulative_counters import accumulate_counters
from headway.runtime.engine.protocol import EngineStats

Another = Callable[[int, int, int, int | None], LiveInstance]
"""Starts one more instance, from (number, pool, number of processes that had the number before, bytes of KV of the
pool's other instances; None: there are none). Raises RequestError."""


class InstanceRoster:
    """All instances of one cluster, with their tasks and the counters of those that have left."""

    def __init__(self, fleet: InstanceRegistry, listener: InstanceListener, another: Another | None) -> None:
        self._fleet, self._listener, self._another = fleet, listener, another
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._incarnations: dict[int, int] = {}
        self.gone = EngineStats()
        """Counters of the instances that have left."""

    def look_after(self, instance: LiveInstance) -> None:
        """Start the task that runs an instance and receives its messages."""
        self._tasks[instance.number] = asyncio.create_task(instance.look_after(self._listener))

    def stop(self) -> None:
        """Cancel the tasks of all instances."""
        for task in self._tasks.values():
            task.cancel()

    def reports(self, membership: LiveMembership | None) -> list[InstanceReport]:
        """Return the reports of all instances."""
        placed = Counter[int]() if membership is None else membership.placed()
        return [self._report(each, membership, placed) for each in self._fleet]

    def _report(
        self, instance: LiveInstance, membership: LiveMembership | None, all_placed: Counter[int]
    ) -> InstanceReport:
        number, stats = instance.number, instance.stats
        placed = all_placed[number]
        queued, free_in_s = (0, 0.0) if membership is None else membership.figures(number)
        if instance.state == "lost":
            queued, free_in_s = 0, 0.0
        return InstanceReport(
            id=number,
            role=instance.role,
            node=instance.node,
            host=instance.host,
            pool=instance.pool,
            state="draining" if membership is not None and number in membership.leaving else instance.state,
            incarnation=instance.incarnation,
            pid=instance.pid,
            placed=placed,
            running=stats.running,
            waiting=stats.waiting,
            queued_tokens=queued,
            free_in_s=free_in_s,
            kv_tokens_used=stats.kv_tokens_used,
            kv_tokens_total=0 if instance.info is None else instance.info.kv_tokens_total,
            prefill_tokens_total=stats.prefill_tokens_total,
            decode_tokens_total=stats.decode_tokens_total,
            restarts_total=stats.engine_restarts_total,
            failure=instance.failure,
        )

    def join(self, pool: int, membership: LiveMembership) -> InstanceReport:
        """See `InstanceAdmin.join`. The instance gets the lowest free number."""
        if self._another is None:
            raise RequestError("this cluster cannot start more instances", "pool")
        number = 0
        while self._fleet.get(number) is not None:
            number += 1
        try:
            instance = self._another(number, pool, self._incarnations.get(number, 0), self._kv_bytes(pool))
        except OSError as error:
            raise UnavailableError(f"instance {number} cannot be started: {error}", 30.0) from error
        self._fleet.add(instance)
        membership.reserve(number)
        self.look_after(instance)
        return self._report(instance, membership, membership.placed())

    def _kv_bytes(self, pool: int) -> int | None:
        """Return the largest KV pool of a pool's instances, in bytes; None: none has reported one."""
        infos = [each.info for each in self._fleet if each.pool == pool and each.info is not None]
        return max((info.kv_bytes for info in infos), default=None)

    def leave(self, number: int, membership: LiveMembership) -> InstanceReport:
        """See `InstanceAdmin.leave`."""
        instance = self._fleet[number]
        # Without a process there is nothing to drain: the instance leaves at once.
        if not instance.serves:
            instance.drain()
            if instance.state == "failed":
                self.remove(instance)
        elif number not in membership.leaving and instance.state == "ready":
            why = membership.refuses(membership.others(number))
            if why is not None:
                raise RequestError(f"instance {number} cannot leave: without it {why}", "id")
            membership.close(number)
        return self._report(instance, membership, membership.placed())

    def remove(self, instance: LiveInstance) -> None:
        """Remove an instance from the cluster, and keep its counters."""
        self.gone = accumulate_counters(self.gone, accumulate_counters(instance.stats, EngineStats()))
        # A later instance of this number goes on counting, so that its peers can tell it from this one.
        self._incarnations[instance.number] = instance.incarnation + 1
        self._fleet.remove(instance.number)
        self._tasks.pop(instance.number, None)
