"""One instance of several groups (KV parallelism, Medha §3.3), each with a scheduler of its own, and their common
batches in lockstep.

A request longer than a shard starts in one group like any other. When its shard there is full, the least loaded of the
groups that do not hold it joins: it takes over the request's rows and begins the next shard; the earlier groups stay
remote shard holders, which attend its rows over what they hold. Groups that share requests compute in lockstep; others
run freely. Each group reserves its shard when it joins, not before.

Departure: the paper adds the groups of a long request in order; here the least loaded joins, because each group also
serves short requests of its own.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq

from headway.core.batch import Batch, Chunk, RemoteAttention, RequestProgress
from headway.core.errors import ConfigError, InvariantError, RequestError
from headway.core.request import Phase, Request, RequestEvent, Span
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import BatchLoad, LatencyModel, PrefillCache, load_s
from headway.perf.latency.groups import ShardedModel, ShardExchangeCost, assist_s, batch_loads
from headway.policy.iteration.admission import refuse_unservable
from headway.policy.iteration.budget import reference_aim_s
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy, RemoteCost
from headway.policy.iteration.requests import WHOLE, SequenceState
from headway.policy.iteration.scheduler import InstanceScheduler, Scheduler
from headway.policy.iteration.state import ShardTable, audit, limit_of, shard_tokens

# One batch of several groups in lockstep, which are connected by requests with shards in several of them.
#
# Within one batch the rows of such a request are computed by the group that holds its last shard; every other group of
# the request attends these rows over its own shard (`RemoteAttention`). Owners of waiting long prefills pack first, the
# least recently served before the others; then the other groups fill what is left of their time with prefills of their
# own.


class LockstepBatch:
    """One batch of several groups while it is packed.

    `spanning`: the requests with shards in several of the groups, each with the number of its owner group."""

    def __init__(
        self,
        groups: Seq[Scheduler],
        spanning: Seq[tuple[SequenceState, int]],
        latency: LatencyModel,
        exchange: ShardExchangeCost,
    ) -> None:
        self.groups = groups
        self.latency = latency
        self.exchange = exchange
        self._owner = {sequence.request.id: (sequence, owner) for sequence, owner in spanning}
        # By group: remote attention over its shards, its load so far, and its chunks.
        self._assists: dict[int, list[RemoteAttention]] = {group.group: [] for group in groups}
        self._loads: dict[int, BatchLoad] = {}
        self._chunks: dict[int, list[Chunk]] = {}
        for group in groups:
            count = len(group.state.ready)
            self._loads[group.group] = BatchLoad(count, count, group.state.ready.kv_sum)
        for name, (sequence, owner) in self._owner.items():
            # A decode that waits for KV or is in flight computes no row in this batch.
            if sequence.decoding and name in self._ready(owner):
                self._assist(sequence, owner, 1, decode=True)
        # Charge the fixed exchange cost to all groups: which ones take part is known only when all are packed.
        if any(self._assists.values()):
            for index, load in self._loads.items():
                self._loads[index] = load.with_chunk(0, exchange.fixed_s)

    def remote_cost(self, request_id: str) -> RemoteCost:
        """Return what the shard holders add to a chunk of this request (called while its owner packs).

        The chunk is sized against the busiest holder and the largest shard: it then fits every group's iteration, since
        none attends more tokens than that."""
        sequence, owner = self._owner[request_id]
        past = max(shard.tokens for shard in sequence.shards)
        own_s = load_s(self.latency, self._loads[owner])
        most_s = max(load_s(self.latency, self._loads[shard.group]) for shard in sequence.shards)
        reserved_s = self.exchange.fixed_s + max(0.0, most_s - own_s)
        return RemoteCost(past, reserved_s, self.exchange.row_s * len(sequence.shards))

    def pack(self, now: float) -> None:
        """Pack chunks of waiting prefills, group by group."""
        # Spanning requests that wait for prefill (slot < 0: not in the queue).
        waits = {sequence.request.id: sequence for sequence, _ in self._owner.values() if sequence.slot >= 0}
        # By owner group of such a request: the iteration in which its least recently served one got tokens.
        last = {
            group.group: min(s.last_progress for s in waits.values() if self._owner[s.request.id][1] == group.group)
            for group in self.groups
            if any(self._owner[name][1] == group.group for name in waits)
        }
        shorts = any(group.policy.shorts_wait() for group in self.groups)
        # Lockstep groups end together: the shortest budget of any bounds all.
        least_s = min(group.policy.budget_s(now) for group in self.groups)
        # Owners of spanning prefills first (their chunks load all holders), the least recently served one leading.
        for group in sorted(self.groups, key=lambda g: (g.group not in last, last.get(g.group, 0), g.group)):
            chunks, load = group.pick_chunks(self._loads[group.group], now, shorts and group.group in last, least_s)
            self._loads[group.group], self._chunks[group.group] = load, chunks
            for chunk in chunks:
                if chunk.request in self._owner:
                    # Charge the holders at once: groups that pack later see what is left of their time.
                    self._assist(self._owner[chunk.request][0], group.group, chunk.tokens)

    def commit(self, number: int, ahead: int) -> Batch | None:
        """Put the batch in flight and return it; None if there is nothing to compute. `ahead` as in `schedule`."""
        working = [g for g in self.groups if g.state.ready.members or self._chunks[g.group] or self._assists[g.group]]
        if not working:
            return None
        repeat = 1
        if ahead > 1 and not any(self._chunks.values()):
            # All groups repeat equally often: until the first lease of any of them fills.
            repeat = max(1, min(ahead, *(group.state.ready.room() for group in working)))
        parts = [
            group.commit(number, self._chunks[group.group], BatchLoad(), repeat, tuple(self._assists[group.group]))
            for group in working
        ]
        # Exact loads: while packing, the fixed exchange cost was charged to all groups, now to those that take part.
        loads = batch_loads(self.latency, parts, self.exchange)
        for group, load in zip(working, loads, strict=True):
            group.expect(number, load)
        seconds = max(load_s(self.latency, load) for load in loads)
        return Batch(id=number, parts=tuple(parts), predicted_s=seconds, repeat=repeat)

    def _ready(self, owner: int) -> dict[str, SequenceState]:
        """Return the ready decodes of a group, by request id."""
        return next(group.state.ready.members for group in self.groups if group.group == owner)

    def _assist(self, sequence: SequenceState, owner: int, rows: int, decode: bool = False) -> None:
        """Add remote attention of `rows` rows over each shard of a request, and its time to the holders' loads."""
        row_s = self.exchange.row_s * rows
        for shard in sequence.shards:
            self._assists[shard.group].append(
                RemoteAttention(sequence.request.id, rows, owner, shard.start, shard.tokens)
            )
            load = self._loads[shard.group]
            if decode:
                # The holder attends one row but runs no linear layer for it: `decodes` grows, `tokens` does not.
                load = BatchLoad(
                    load.tokens, load.decodes + 1, load.decode_kv + shard.tokens, load.chunk_s, load.chunk_past
                )
                load = load.with_chunk(0, row_s)
                self._loads[owner] = self._loads[owner].with_chunk(0, row_s)
            else:
                load = load.with_chunk(0, assist_s(self.latency, shard.tokens, rows) + row_s + self.exchange.fixed_s)
            self._loads[shard.group] = load


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
        self.groups = [
            Scheduler(config, latency, block_manager, index, self.shard_table, times)
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
        return self.groups[self.shard_table.by_load()[0].group].predicted_ttft_s(request, now)

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
        sequence = self.groups[self.shard_table.by_load()[0].group].enter(request, self._arrivals, limit)
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
            while batch is None and self.shard_table.unblock(now):
                batch = self._schedule(now, ahead, free)
        return batch

    def _schedule(self, now: float, ahead: int, free: Container[int] | None) -> Batch | None:
        able = {group.group for group in self.groups if group.open and (free is None or group.group in free)}
        if not able:
            return None
        # Shards first: a join changes which groups are in lockstep, and the owner of the next chunk.
        self.shard_table.extend_prefills(
            now, {group for together in self.lockstep_groups() if able.issuperset(together) for group in together}
        )
        for group in self.groups:
            if group.group in able:
                group.grow_decodes(now)
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
            return self.groups[together[0]].build(now, ahead, self._batches)
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
        events = self.shard_table.drain_events()
        for group in groups:
            # One measurement, one observation: the other parts finished earlier, at an unknown time.
            took_s = elapsed_s if group is slowest else None
            events += group.complete(batch_id, mine[group.group], now, took_s, repeats)
        for group in self.groups:
            # A transferred request may be aborted in one group while its last chunk is in flight in another.
            events += group.end_aborted(now)
        return self._forget_ended(events)

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        return self._forget_ended(self._owner(request_id).abort(request_id, now)) if request_id in self else []

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`. Does nothing: KV of several groups cannot be staged."""
        return []

    def lost(self, instance: int, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`. All groups of the instance have lost their KV."""
        self._in_flight.clear()
        events = self.shard_table.drain_events()
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
