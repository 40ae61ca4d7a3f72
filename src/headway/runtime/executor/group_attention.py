"""Attention of one rank over requests whose keys lie in several KV groups (KVP, Medha §3.3).

A request's rows are computed in one group, their owner. In each layer the owner sends their queries to every other
group that holds a shard of the request; each such group attends them over its shard, without mask because all of the
shard is before the rows, and returns a partial answer in fp32; the owner merges these with its own by log-sum-exp. A
group may own some requests of a batch and hold remote shards of others, also of a group that holds a shard for it.

Freedom from deadlock. Each layer has three steps on every rank of a batch, always in this order: (1) send own queries,
(2) attend foreign queries and send the answers, (3) receive the answers to own queries. Sends never block. A wait in
step 2 is for a message of another rank's step 1 in the same batch, stage and layer; a wait in step 3 for one of step 2.
Sums over tensor-parallel ranks come between steps 3 and 1 of the next layer, and rows from the stage before come before
layer 0. So every wait is for a step that comes earlier in the order (batch, stage, layer, step), and all ranks proceed
in that order: every group carries out its batches in the order in which the engine made them. The least step that is
waited for can therefore always be taken. Messages between two ranks keep their order and need no labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.runtime.attention.base import AttentionBackend, AttentionPlan, BatchSegment
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.attention.native import kernels
from headway.runtime.attention.partial import PartialAttention, PartialRead
from headway.runtime.attention.primitive import merge
from headway.runtime.attention.slots import cut_ranges
from headway.runtime.executor.rank_links import PeerLinks


class RemoteQuery(NamedTuple):
    """Rows of this batch that group `group` attends as well, in the order in which it expects them."""

    group: int
    segments: tuple[BatchSegment, ...]


class RemoteRows(NamedTuple):
    """Rows of another group's request, to be attended over this group's shard."""

    owner: int
    """The group that computes the rows."""
    rows: int
    slot_ranges: list[tuple[int, int]]
    """Slot ranges of the shard."""


class _OwnerRows:
    """Rows attended for one owner group: all queries arrive in one message, all answers leave in one."""

    def __init__(self, owner: int, remote_rows: Sequence[RemoteRows], pool: KvPool) -> None:
        self.owner = owner
        readings = []
        at = 0
        for remote in remote_rows:
            # Not causal: every token of a remote shard lies before all of the owner's rows.
            readings.append(PartialRead(at, remote.rows, remote.slot_ranges, False))
            at += remote.rows
        self.rows = at
        self.partials = PartialAttention(readings, pool, kernels())


class SharedPlan:
    """One iteration of one rank.

    own: the plan of its own rows, which stores all of them and attends those that are not shared. own_partials: partial
    attention of its shared rows over its own shard.
    """

    def __init__(
        self,
        rows: int,
        pool: KvPool,
        own: AttentionPlan | None,
        own_partials: PartialAttention | None,
        remote_queries: Sequence[RemoteQuery],
        owners: Sequence[_OwnerRows],
    ) -> None:
        self.rows, self.pool = rows, pool
        self.own, self.own_partials = own, own_partials
        self.owners = owners
        self.began_s = 0.0
        """When the first queries of another group had arrived: the start of the work of a rank without own rows."""
        self.queries: list[Callable[[], Tensor]] = []
        self.answers: list[Callable[[], Tensor]] = []
        device = pool.data.device
        self.sent = [
            (
                remote_query.group,
                torch.cat([torch.arange(s.start, s.start + s.tokens) for s in remote_query.segments]).to(device),
            )
            for remote_query in remote_queries
        ]
        """(group, rows of the batch)."""
        where: dict[int, tuple[BatchSegment, list[tuple[int, int]]]] = {}
        for index, remote_query in enumerate(remote_queries):
            at = 0
            for segment in remote_query.segments:
                where.setdefault(segment.start, (segment, []))[1].append((index, at))
                at += segment.tokens
        self.merges = list(where.values())
        """(segment, where its rows are in the answers: (index of the group in `sent`, first row))."""


class GroupAttention:
    """`AttentionBackend` around another, for a rank of one of several KV groups. `q_heads`: this rank's."""

    def __init__(self, inner: AttentionBackend, links: PeerLinks, q_heads: int) -> None:
        self.inner = inner
        self._links = links
        self._q_heads = q_heads

    def plan(self, segments: Sequence[BatchSegment], pool: KvPool) -> AttentionPlan:
        """See `AttentionBackend.plan`. For requests that lie in this group only."""
        return self.inner.plan(segments, pool)

    def share(
        self,
        segments: Sequence[BatchSegment],
        pool: KvPool,
        remote_queries: Sequence[RemoteQuery],
        remote_rows: Sequence[RemoteRows],
    ) -> SharedPlan:
        """Plan an iteration in which other groups attend some of these rows, or this group attends some of theirs.

        Of segments in `remote_queries`, `past` counts the tokens that this group holds. Without segments, only
        `answer_queries` is called.
        """
        shared = {segment.start for remote_query in remote_queries for segment in remote_query.segments}
        own = own_partials = None
        rows = 0
        if segments:
            rows = segments[-1].start + segments[-1].tokens
            own = self.inner.plan([s._replace(shared=s.start in shared) for s in segments], pool)
        if shared:
            chosen = [s for s in segments if s.start in shared]
            readings = [
                PartialRead(s.start, s.tokens, cut_ranges(s.slot_ranges, 0, s.past + s.tokens), True) for s in chosen
            ]
            own_partials = PartialAttention(readings, pool, kernels())
        owners = [
            _OwnerRows(owner, [remote for remote in remote_rows if remote.owner == owner], pool)
            for owner in sorted({remote.owner for remote in remote_rows})
        ]
        plan = SharedPlan(rows, pool, own, own_partials, remote_queries, owners)
        # Receives of layer 0 are posted at planning, those of layer i + 1 at the start of layer i's visits.
        self._expect(plan, 0)
        return plan

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """See `AttentionBackend.run`."""
        if not isinstance(plan, SharedPlan):
            return self.inner.run(layer, q, k, v, plan)
        assert plan.own is not None
        # Step 1, before own attention, which then overlaps with that of the remote groups.
        for group, rows in plan.sent:
            self._links.send_to(group, q.index_select(0, rows))
        out = self.inner.run(layer, q, k, v, plan.own)
        own_partials = None if plan.own_partials is None else plan.own_partials.run(layer, q)
        answers = self.answer_queries(layer, plan)
        if own_partials is not None:
            received = [wait() for wait in answers]
            for segment, places in plan.merges:
                rows_here = slice(segment.start, segment.start + segment.tokens)
                # An answer has d + 1 columns: the partial output, and its log-sum-exp in the last.
                remote = [received[index][at : at + segment.tokens] for index, at in places]
                outs = [own_partials[0][rows_here], *(answer[..., :-1] for answer in remote)]
                lses = [own_partials[1][rows_here], *(answer[..., -1] for answer in remote)]
                out[rows_here] = merge(outs, lses)[0]
        return out

    def answer_queries(self, layer: int, plan: SharedPlan) -> list[Callable[[], Tensor]]:
        """Attend rows of other groups and send the answers. Returns the waits for answers to own queries."""
        # Take this layer's receives before `_expect` replaces them by the next layer's.
        queries, answers = plan.queries, plan.answers
        self._expect(plan, layer + 1)
        for owner, wait in zip(plan.owners, queries, strict=True):
            query = wait()
            plan.began_s = plan.began_s or time.monotonic()
            out, lse = owner.partials.run(layer, query)
            self._links.send_to(owner.owner, torch.cat((out, lse.unsqueeze(-1)), dim=-1))
        return answers

    def _expect(self, plan: SharedPlan, layer: int) -> None:
        """Post the receives of a layer's messages, one layer ahead, so that they are received as soon as sent."""
        plan.queries, plan.answers = [], []
        pool = plan.pool
        if layer == pool.layers:
            return
        heads, dim, links = self._q_heads, pool.head_dim, self._links
        for owner in plan.owners:
            plan.queries.append(links.expect_from(owner.owner, (owner.rows, heads, dim), pool.dtype))
        for group, rows in plan.sent:
            plan.answers.append(links.expect_from(group, (len(rows), heads, dim + 1), torch.float32))
