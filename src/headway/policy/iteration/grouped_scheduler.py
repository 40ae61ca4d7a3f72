"""One instance of several groups (KV parallelism, Medha §3.3), each with a scheduler and requests of its own.

A request longer than a shard starts in one group like any other. When its shard there is full, the least loaded of the
groups that do not hold it joins: it takes over the request's rows and begins the next shard; the earlier groups stay
remote shard holders, which attend its rows over what they hold. Groups that share requests compute in lockstep;
others run freely. Each group reserves its shard when it joins, not before.

Departure: the paper adds the groups of a long request in order; here the least loaded joins, because each group also
serves short requests of its own.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq

from headway.core.batch import Batch, RequestProgress
from headway.core.errors import ConfigError, InvariantError, RequestError
from headway.core.events import RequestEvent
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.prefill_cache import PrefillCache
from headway.perf.latency.shard_exchange import ShardedModel, ShardExchangeCost
from headway.policy.iteration.admission import refuse_unservable
from headway.policy.iteration.audit import audit
from headway.policy.iteration.base import InstanceScheduler
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.efficient_chunks import reference_aim_s
from headway.policy.iteration.lockstep import LockstepBatch
from headway.policy.iteration.prefill import WHOLE
from headway.policy.iteration.scheduler import Scheduler
from headway.policy.iteration.shard_placement import ShardPlacement
from headway.policy.iteration.shard_table import ShardTable
from headway.policy.iteration.shards import limit_of, shard_tokens


def make_scheduler(
    config: SchedulerConfig,
    latency: LatencyModel,
    block_managers: Seq[BlockManager],
    exchange: ShardExchangeCost = ShardExchangeCost(),  # noqa: B008
) -> InstanceScheduler:
    """Make the scheduler of an instance; `block_managers` has one for each of its `config.kv_parallel`
    groups.

    Raises ConfigError when the numbers differ."""
    if len(block_managers) != config.kv_parallel:
        raise ConfigError(f"kv_parallel is {config.kv_parallel} and there are {len(block_managers)} KV pools")
    return (
        GroupedScheduler(config, latency, block_managers, exchange)
        if len(block_managers) > 1
        else Scheduler(config, latency, block_managers[0])
    )


def group_policies(scheduler: InstanceScheduler) -> list[IterationPolicy]:
    """Return the policy of each KV group of a scheduler."""
    groups = scheduler.groups if isinstance(scheduler, GroupedScheduler) else [scheduler]
    return [group.policy for group in groups if isinstance(group, Scheduler)]


class GroupedScheduler:
    """Implement `InstanceScheduler` over one `Scheduler` a group.

    Nothing waits for ever. The oldest long request that has found no next shard for `ADMISSION_AGE_S` keeps others (but
    for short ones, within the headroom) from entering the groups it waits for, and the youngest long request that waits
    as well is evicted. When nothing runs, the youngest long request that holds KV is evicted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        latency: LatencyModel,
        block_managers: Seq[BlockManager],
        exchange: ShardExchangeCost = ShardExchangeCost(),  # noqa: B008
    ) -> None:
        self.config = config
        self.latency = latency
        self.block_managers = tuple(block_managers)
        self.exchange = exchange
        self.shard_tokens = shard_tokens(config, latency, block_managers[0])
        # One cache for all groups. Isolated times count attention over one shard: shards are attended concurrently.
        aim_s = reference_aim_s(config, latency)
        times = PrefillCache(ShardedModel(latency, self.shard_tokens), aim_s, max(config.min_chunk, 16))
        self.shard_table = ShardTable()
        self._placement = ShardPlacement(self.shard_table)
        self.groups = [
            Scheduler(config, latency, block_manager, index, self._placement, times)
            for index, block_manager in enumerate(self.block_managers)
        ]
        # Groups with a part in each batch in flight, by batch id.
        self._in_flight: dict[int, tuple[Scheduler, ...]] = {}
        self._arrivals = 0
        self._batches = 0

    # -- queries -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return sum(group.running for group in self.groups)

    @property
    def waiting(self) -> int:
        """Requests that hold none yet."""
        return sum(group.waiting for group in self.groups)

    @property
    def idle(self) -> bool:
        return all(group.idle for group in self.groups)

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in group for group in self.groups)

    def deadline_s(self, request_id: str) -> float:
        """See `InstanceScheduler`."""
        return self._owner(request_id).deadline_s(request_id)

    def predicted_ttft_s(self, request: Request, now: float) -> float:
        """See `InstanceScheduler`. In the group with the least predicted work, where it would be queued."""
        return self.groups[self._placement.by_load()[0].group].predicted_ttft_s(request, now)

    def progress(self, request_id: str) -> int:
        """See `InstanceScheduler`."""
        return self._owner(request_id).progress(request_id)

    def lockstep_groups(self) -> list[tuple[int, ...]]:
        """Return the partition of the groups into sets that compute in lockstep."""
        return self.shard_table.lockstep_groups()

    # -- the three verbs ----------------------------------------------------------------------------------------

    staged_kv = None

    def add(self, span: Span, now: float, phase: Phase = "all") -> None:
        """Queue a request in the group with the least predicted work.

        Raises RequestError when all groups together could never serve it, and for a phase other than "all": KV does not
        move between instances of several groups."""
        request = span.request
        if phase != "all":
            raise RequestError(f"phase '{phase}': an instance of several KV groups serves whole requests only", "phase")
        if request.id in self:
            raise RequestError(f"request id {request.id!r} is in use", "id")
        refuse_unservable(request, sum(block_manager.total_tokens for block_manager in self.block_managers))
        limit = limit_of(request, self.shard_tokens, len(self.groups), self.block_managers[0].block_tokens)
        sequence = self.groups[self._placement.by_load()[0].group].enter(request, self._arrivals, limit)
        self._arrivals += 1
        if limit != WHOLE:
            self.shard_table.longs[request.id] = sequence

    def schedule(self, now: float, ahead: int = 1, free: Container[int] | None = None) -> Batch | None:
        """See `InstanceScheduler`."""
        batch = self._schedule(now, ahead, free)
        if (
            batch is None
            and not self._in_flight
            and (free is None or all(group.group in free for group in self.groups))
        ):
            # Nothing is in flight and nothing was packed: without an eviction this would be a deadlock.
            while batch is None and self._placement.unblock(now):
                batch = self._schedule(now, ahead, free)
        return batch

    def _schedule(self, now: float, ahead: int, free: Container[int] | None) -> Batch | None:
        able = {group.group for group in self.groups if group.open and (free is None or group.group in free)}
        if not able:
            return None
        # Shards first: a join changes which groups are in lockstep, and the owner of the next chunk.
        self._placement.extend_prefills(
            now, {group for together in self.lockstep_groups() if able.issuperset(together) for group in together}
        )
        for group in self.groups:
            if group.group in able:
                group.builder.grow_decodes(now)
        for together in self.lockstep_groups():
            # A lockstep batch needs the first stage of all its groups at once.
            if not able.issuperset(together):
                continue
            batch = self._launch(together, now, ahead if ahead > 1 and self._quiet(together) else 1)
            if batch is not None:
                self._in_flight[batch.id] = tuple(self.groups[part.group] for part in batch.parts)
                self._batches += 1
                return batch
        return None

    def _launch(self, together: tuple[int, ...], now: float, ahead: int) -> Batch | None:
        if len(together) == 1:
            return self.groups[together[0]].builder.build(now, ahead, self._batches)
        # Requests with shards in several groups, each with the group that computes its rows.
        spanning = [(s, self.shard_table.owner(name).group) for name, s in self.shard_table.longs.items() if s.shards]
        members = [self.groups[index] for index in together]
        making = LockstepBatch(
            members, [(s, owner) for s, owner in spanning if owner in together], self.latency, self.exchange
        )
        self.shard_table.remote_costs = making.remote_cost
        making.pack(now)
        self.shard_table.remote_costs = None
        return making.commit(self._batches, ahead)

    def _quiet(self, together: tuple[int, ...]) -> bool:
        """Whether a batch of these groups may stand for several iterations: decodes are all they have, and no long
        request of another group may join them meanwhile."""
        if not all(self.groups[index].state.only_decodes for index in together):
            return False
        return not self.shard_table.longs or all(group.idle for group in self.groups if group.group not in together)

    def complete(
        self, batch_id: int, results: Seq[RequestProgress], now: float, elapsed_s: float | None = None, repeats: int = 1
    ) -> list[RequestEvent]:
        """See `InstanceScheduler`. `elapsed_s` is attributed to the part that was predicted to be the slowest."""
        groups = self._in_flight.pop(batch_id, None)
        if groups is None:
            raise InvariantError(f"batch {batch_id} is not in flight")
        mine: dict[int, list[RequestProgress]] = {group.group: [] for group in groups}
        for result in results:
            owner = next((group for group in groups if group.yields_token(batch_id, result.request)), None)
            if owner is None:
                raise InvariantError(f"{result.request} yields nothing in batch {batch_id}")
            mine[owner.group].append(result)
        slowest = max(groups, key=lambda group: group.expected_s(batch_id))
        events = self._placement.drain_events()
        for group in groups:
            # One measurement, one observation: the other parts finished earlier, at an unknown time.
            took_s = elapsed_s if group is slowest else None
            events += group.complete(batch_id, mine[group.group], now, took_s, repeats)
        for group in self.groups:
            # A transferred request may be aborted in one group while its last chunk is in flight in another.
            events += group.completion.end_aborted(now)
        return self._forget_ended(events)

    def interrupted(self, batch_id: int, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`. Batches of several groups are not interruptible."""
        raise InvariantError(f"batch {batch_id} cannot be interrupted")

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        return self._forget_ended(self._owner(request_id).abort(request_id, now)) if request_id in self else []

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`. Does nothing: KV of several groups cannot be staged."""
        return []

    def lost(self, instance: int, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`. All groups of the instance have lost their KV."""
        self._in_flight.clear()
        events = self._placement.drain_events()
        for group in self.groups:
            events += group.lost(instance, now)
        for block_manager in self.block_managers:
            block_manager.drain_ops()
        return self._forget_ended(events)

    def _forget_ended(self, events: list[RequestEvent]) -> list[RequestEvent]:
        """Drop requests that these events end from `_longs`. Return the events."""
        for event in events:
            if event.kind in ("finished", "aborted"):
                self.shard_table.longs.pop(event.request, None)
        return events

    def _owner(self, request_id: str) -> Scheduler:
        """Return the group that computes a request's rows. Raises StopIteration for an unknown request."""
        return self.groups[self.shard_table.owner(request_id).group]

    def check(self) -> None:
        """Raise InvariantError unless every group is in order and the shards of each request are adjacent."""
        for group in self.groups:
            audit(group.state, frozenset(s.request.id for s in self.shard_table.remote_holders(group.group)))
        for name, sequence in self.shard_table.longs.items():
            at = 0
            for shard in sequence.shards:
                if shard.start != at or not 0 < shard.tokens <= min(sequence.limit, shard.lease.tokens):
                    raise InvariantError(f"a shard of {name} begins at {shard.start} with {shard.tokens} tokens")
                at += shard.tokens
            if sequence.base != at or sequence.scheduled - at > sequence.limit:
                raise InvariantError(f"the last shard of {name} begins at {sequence.base}, not {at}, or is too long")
            if len(set(self.shard_table.holders(sequence))) != 1 + len(sequence.shards):
                raise InvariantError(f"a group holds two shards of {name}")
