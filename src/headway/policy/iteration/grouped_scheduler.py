"""One instance of several groups (KV parallelism, Medha §3.3), each with a scheduler and requests of its own.

A request longer than a shard starts in one group like any other. When its shard there is full, the least loaded of the
groups that do not hold it joins: it takes over the request's rows and begins the next shard; the earlier groups stay
remote shard holders, which attend its rows over what they hold. Groups that share requests compute in lockstep;
others run freely. Each group reserves its shard when it joins, not before.

Departure: the paper adds the groups of a long request in order; here the least loaded joins, because each group also
serves short requests of its own.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from collections.abc import Sequence as Seq

from headway.core.batch import Batch, RequestProgress
from headway.core.errors import ConfigError, InvariantError, RequestError
from headway.core.events import RequestEvent
from headway.core.span import Phase, Span
from headway.kv.block_manager import BlockManager, KvLease
from headway.kv.kv_shards import KvShardLease
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.prefill_cache import PrefillCache
from headway.perf.latency.shard_exchange import ShardedModel, ShardExchangeCost
from headway.policy.iteration.admission import refuse_unservable
from headway.policy.iteration.audit import audit
from headway.policy.iteration.base import InstanceScheduler
from headway.policy.iteration.candidates import RemoteCost
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.lockstep import LockstepBatch, connected
from headway.policy.iteration.prefill import WHOLE
from headway.policy.iteration.scheduler import Scheduler
from headway.policy.iteration.sequence import SequenceState
from headway.policy.iteration.shards import limit_of, shard_tokens


def make_scheduler(
    config: SchedulerConfig,
    latency: LatencyModel,
    ledgers: Seq[BlockManager],
    exchange: ShardExchangeCost = ShardExchangeCost(),  # noqa: B008
) -> InstanceScheduler:
    """Make the scheduler of an instance; `ledgers` has one block manager for each of its `config.kv_parallel` groups.

    Raises ConfigError when the numbers differ."""
    if len(ledgers) != config.kv_parallel:
        raise ConfigError(f"kv_parallel is {config.kv_parallel} and there are {len(ledgers)} KV pools")
    return (
        GroupedScheduler(config, latency, ledgers, exchange)
        if len(ledgers) > 1
        else Scheduler(config, latency, ledgers[0])
    )


class GroupedScheduler:
    """Implement `InstanceScheduler` over one `Scheduler` a group, and `NeighbourGroups` for each of these.

    Nothing waits for ever. The oldest long request that has found no next shard for `admission_age_s` keeps others (but
    for short ones, within the headroom) from entering the groups it waits for, and the youngest long request that waits
    as well is evicted. When nothing runs, the youngest long request that holds KV is evicted.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        latency: LatencyModel,
        ledgers: Seq[BlockManager],
        exchange: ShardExchangeCost = ShardExchangeCost(),  # noqa: B008
    ) -> None:
        self.config = config
        self.latency = latency
        self.ledgers = tuple(ledgers)
        self.exchange = exchange
        self.shard_tokens = shard_tokens(config, latency, ledgers[0])
        # One cache for all groups. Isolated times count attention over one shard: shards are attended concurrently.
        times = PrefillCache(ShardedModel(latency, self.shard_tokens), config.t_target_s, max(config.min_chunk, 16))
        self.groups = [
            Scheduler(config, latency, ledger, index, self, times) for index, ledger in enumerate(self.ledgers)
        ]
        # Requests that may need several shards, by id, until they end.
        self._longs: dict[str, SequenceState] = {}
        # Groups with a part in each batch in flight, by batch id.
        self._in_flight: dict[int, tuple[Scheduler, ...]] = {}
        self._lockstep_groups = connected(len(self.groups), ())
        # The batch that is being packed, for `remote_cost`.
        self._making: LockstepBatch | None = None
        # Whether shards were added or freed since `_lockstep_groups` was computed.
        self._stale = False
        # Preemptions while scheduling, returned by the next `complete` or `lost`.
        self._pending_events: list[RequestEvent] = []
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
        return self._owner_group(request_id).deadline_s(request_id)

    def progress(self, request_id: str) -> int:
        """See `InstanceScheduler`."""
        return self._owner_group(request_id).progress(request_id)

    def lockstep_groups(self) -> list[tuple[int, ...]]:
        """Return the partition of the groups into sets that compute in lockstep."""
        if self._stale:
            self._lockstep_groups = connected(
                len(self.groups), (self._groups_of(s) for s in self._longs.values() if s.shards)
            )
            self._stale = False
        return self._lockstep_groups

    # -- the three verbs ----------------------------------------------------------------------------------------

    custody = None

    def add(self, span: Span, now: float, phase: Phase = "all") -> None:
        """Queue a request in the group with the least predicted work.

        Raises RequestError when all groups together could never serve it, and for a phase other than "all": KV does not
        move between instances of several groups."""
        request = span.request
        if phase != "all":
            raise RequestError(f"phase '{phase}': an instance of several KV groups serves whole requests only", "phase")
        if request.id in self:
            raise RequestError(f"request id {request.id!r} is in use", "id")
        refuse_unservable(request, sum(ledger.total_tokens for ledger in self.ledgers))
        limit = limit_of(request, self.shard_tokens, len(self.groups), self.ledgers[0].block_tokens)
        sequence = self._by_load()[0].enter(request, self._arrivals, limit)
        self._arrivals += 1
        if limit != WHOLE:
            self._longs[request.id] = sequence

    def schedule(self, now: float, ahead: int = 1, free: Container[int] | None = None) -> Batch | None:
        """See `InstanceScheduler`."""
        batch = self._schedule(now, ahead, free)
        if (
            batch is None
            and not self._in_flight
            and (free is None or all(group.group in free for group in self.groups))
        ):
            # Nothing is in flight and nothing was packed: without an eviction this would be a deadlock.
            while batch is None and self._unblock(now):
                batch = self._schedule(now, ahead, free)
        return batch

    def _schedule(self, now: float, ahead: int, free: Container[int] | None) -> Batch | None:
        able = {group.group for group in self.groups if group.open and (free is None or group.group in free)}
        if not able:
            return None
        # Shards first: a join changes which groups are in lockstep, and the owner of the next chunk.
        self._grow_prefills(
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
        spanning = [(s, self._owner_group(name).group) for name, s in self._longs.items() if s.shards]
        members = [self.groups[index] for index in together]
        making = LockstepBatch(
            members, [(s, owner) for s, owner in spanning if owner in together], self.latency, self.exchange
        )
        self._making = making
        making.pack(now)
        self._making = None
        return making.commit(self._batches, ahead)

    def _quiet(self, together: tuple[int, ...]) -> bool:
        """Whether a batch of these groups may stand for several iterations: decodes are all they have, and no long
        request of another group may join them meanwhile."""
        if not all(self.groups[index].state.only_decodes for index in together):
            return False
        return not self._longs or all(group.idle for group in self.groups if group.group not in together)

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
        events, self._pending_events = self._pending_events, []
        for group in groups:
            # One measurement, one observation: the other parts finished earlier, at an unknown time.
            took_s = elapsed_s if group is slowest else None
            events += group.complete(batch_id, mine[group.group], now, took_s, repeats)
        for group in self.groups:
            # A transferred request may be aborted in one group while its last chunk is in flight in another.
            events += group.completion.end_aborted(now)
        return self._forget_ended(events)

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        return self._forget_ended(self._owner_group(request_id).abort(request_id, now)) if request_id in self else []

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`. Does nothing: KV of several groups cannot be staged."""
        return []

    def lost(self, instance: int, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`. All groups of the instance have lost their KV."""
        self._in_flight.clear()
        events, self._pending_events = self._pending_events, []
        for group in self.groups:
            events += group.lost(instance, now)
        for ledger in self.ledgers:
            ledger.drain_ops()
        return self._forget_ended(events)

    def _forget_ended(self, events: list[RequestEvent]) -> list[RequestEvent]:
        """Drop requests that these events end from `_longs`. Return the events."""
        for event in events:
            if event.kind in ("finished", "aborted"):
                self._longs.pop(event.request, None)
        return events

    def check(self) -> None:
        """Raise InvariantError unless every group is in order and the shards of each request are adjacent."""
        for group in self.groups:
            audit(group.state, frozenset(s.request.id for s in self.remote_holders(group.group)))
        for name, sequence in self._longs.items():
            at = 0
            for shard in sequence.shards:
                if shard.start != at or not 0 < shard.tokens <= min(sequence.limit, shard.lease.tokens):
                    raise InvariantError(f"a shard of {name} begins at {shard.start} with {shard.tokens} tokens")
                at += shard.tokens
            if sequence.base != at or sequence.scheduled - at > sequence.limit:
                raise InvariantError(f"the last shard of {name} begins at {sequence.base}, not {at}, or is too long")
            if len(set(self._groups_of(sequence))) != 1 + len(sequence.shards):
                raise InvariantError(f"a group holds two shards of {name}")

    # -- NeighbourGroups ----------------------------------------------------------------------------------------

    def extend_shards(self, sequence: SequenceState, now: float) -> bool:
        """See `NeighbourGroups`. Before the shard is full, another group joins only if the groups without a shard of
        this request, at full shard length, would hold the rest."""
        if sequence.computed - sequence.base < sequence.limit:
            # An early join wastes the tail of this shard: check that the remaining groups still suffice.
            left = len(self.groups) - 1 - len(sequence.shards)
            need = sequence.prompt + sequence.request.max_output_tokens - sequence.computed
            if left * sequence.limit < need:
                return False
        return self._join(sequence, now)

    def remote_holders(self, group: int) -> Iterator[SequenceState]:
        """See `NeighbourGroups`."""
        return (s for s in self._longs.values() if any(shard.group == group for shard in s.shards))

    def is_in_flight(self, sequence: SequenceState) -> bool:
        """See `NeighbourGroups`."""
        return self._owner_group(sequence.request.id).state.is_in_flight(sequence)

    def preempt(self, sequence: SequenceState, now: float) -> RequestEvent:
        """See `NeighbourGroups`."""
        return self._owner_group(sequence.request.id).state.preempt(sequence, now)

    def shards_freed(self) -> None:
        """See `NeighbourGroups`."""
        self._stale = True

    def remote_cost(self, request_id: str) -> RemoteCost:
        """See `NeighbourGroups`."""
        assert self._making is not None
        return self._making.remote_cost(request_id)

    # -- shards -------------------------------------------------------------------------------------------------

    def _grow_prefills(self, now: float, able: Container[int]) -> None:
        """Transfer prefills whose shard is full to another group, and make way for the one that has waited too long.

        `able`: groups that could compute now. A transfer before its groups can compute would only put the new group
        into lockstep early."""
        for sequence in list(self._longs.values()):
            full = sequence.lease is not None and sequence.room <= 0 < sequence.remaining
            if full and sequence.slot >= 0 and self._owner_group(sequence.request.id).group in able:
                self._join(sequence, now)
        # `skipped_since` of a request that holds KV: no group had blocks for its next shard (`_join`).
        stuck = [s for s in self._longs.values() if s.lease is not None and s.skipped_since is not None]
        oldest = min(stuck, key=lambda s: s.order, default=None)
        since = now if oldest is None or oldest.skipped_since is None else oldest.skipped_since
        late = oldest is not None and now - since >= self.config.admission_age_s
        held = set(self._groups_of(oldest)) if oldest is not None else set()
        for group in self.groups:
            # Groups that hold a shard of it already cannot take the next one: no reason to close them.
            group.policy.candidates.reserved_for = oldest if late and group.group not in held else None
        # Two long requests may wait for each other's blocks: evict the youngest, never the oldest.
        if late and len(stuck) > 1:
            self._evict(max(stuck, key=lambda s: s.order), now)

    def _join(self, sequence: SequenceState, now: float) -> bool:
        """Transfer the request to the least loaded group with blocks for its next shard.

        False: there is none, it waits."""
        home = self._owner_group(sequence.request.id)
        held = set(self._groups_of(sequence))
        start = sequence.scheduled
        for group in self._by_load():
            if group.group in held:
                continue
            lease = self._room(group, sequence, start, now)
            if lease is None:
                continue
            assert sequence.lease is not None
            # The old shard ends at `scheduled`: chunks in flight still write below it, none writes beyond.
            shard = KvShardLease(home.group, home.ledger, sequence.lease, sequence.base, start - sequence.base)
            home.state.transfer_out(sequence)
            sequence.shards += (shard,)
            sequence.base, sequence.lease, sequence.skipped_since = start, lease, None
            group.state.transfer_in(sequence)
            self._stale = True
            return True
        if sequence.skipped_since is None:
            sequence.skipped_since = now
        return False

    def _room(self, group: Scheduler, sequence: SequenceState, start: int, now: float) -> KvLease | None:
        """Reserve the next shard in `group`, or return None.

        For a decode, younger requests are evicted as in its own group."""
        lease = group.state.growth.next_shard(sequence, start)
        while lease is None and sequence.decoding and group.state.evict_behind(sequence, now):
            lease = group.state.growth.next_shard(sequence, start)
        return lease

    def _unblock(self, now: float) -> bool:
        """Evict the youngest long request that holds KV. False: none does.

        Called when nothing is in flight and nothing fits."""
        holding = [s for s in self._longs.values() if s.lease is not None]
        if holding:
            self._evict(max(holding, key=lambda s: s.order), now)
        return bool(holding)

    def _evict(self, sequence: SequenceState, now: float) -> None:
        """Preempt a request unless it is in a batch in flight."""
        if not self.is_in_flight(sequence):
            self._pending_events.append(self.preempt(sequence, now))

    def _by_load(self) -> list[Scheduler]:
        """Return the groups, the one with the least predicted work first.

        A request counts in all groups that hold it."""
        seconds = [group.outstanding_s() for group in self.groups]
        for sequence in self._longs.values():
            if sequence.slot >= 0:
                for shard in sequence.shards:
                    seconds[shard.group] += sequence.work_s
        # The group number breaks ties, so that decisions are reproducible.
        return sorted(self.groups, key=lambda group: (seconds[group.group], group.group))

    def _groups_of(self, sequence: SequenceState) -> Iterable[int]:
        """Yield the groups that hold a shard of the request; the owner group last."""
        yield from (shard.group for shard in sequence.shards)
        yield self._owner_group(sequence.request.id).group

    def _owner_group(self, request_id: str) -> Scheduler:
        """Return the group that computes a request's rows. Raises StopIteration for an unknown request."""
        return next(group for group in self.groups if request_id in group)
