"""One batch of several groups in lockstep, which are connected by requests with shards in several of them.

Within one batch the rows of such a request are computed by the group that holds its last shard; every other group of
the request attends these rows over its own shard (`RemoteAttention`). Owners of waiting long prefills pack first, the
least recently served before the others; then the other groups fill what is left of their time with prefills of their
own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from headway.core.batch import Batch, Chunk, RemoteAttention
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.perf.latency.parts import assist_s, batch_loads
from headway.perf.latency.shard_exchange import ShardExchangeCost
from headway.policy.iteration.decision import RemoteCost
from headway.policy.iteration.scheduler import Scheduler
from headway.policy.iteration.sequence import SequenceState


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
            chunks, load = group.builder.pick_chunks(
                self._loads[group.group], now, shorts and group.group in last, least_s
            )
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
            group.builder.commit(
                number, self._chunks[group.group], BatchLoad(), repeat, tuple(self._assists[group.group])
            )
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
