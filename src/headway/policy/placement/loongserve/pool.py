"""The scheduler of one elastic pool of instances (LoongServe §5): which prompts begin, where, and what decodes where.

Work goes in rounds (the published code's macro iterations). When no prefill runs, prompts are dispatched in order of
arrival (§5.1), instances are found for them, by packing or pausing decodes where that gains more than it costs (§5.2),
and dynamic programming splits both (§5.3). While the round lasts, prompts that end within it fill instances that are
free, whatever their place in the queue. A batch whose prefill ends keeps the instances that its KV needs and decodes
there (proactive scale-down, §4.1); more are added when KV or the number of requests asks for it (scale-up, §4.2).

Departures: KV moves between batches whole, over the simulator's links, and only from batches on one instance; only
those are paused too; what a decoding request has made is taken from the time since it began.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from headway.core.request import Request
from headway.core.span import Span, Strategy
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.groups import GroupLatency
from headway.policy.placement.base import Action, CommitSpans, EnqueueRequest, PreemptRequest, RejectRequest, TransferKv
from headway.policy.placement.decode import DecodeSide
from headway.policy.placement.loongserve.batching import partition
from headway.policy.placement.loongserve.decodes import UNLIMITED, DecodeBatch, reserve_of, room_of
from headway.policy.placement.loongserve.dispatch import dispatch
from headway.policy.placement.loongserve.options import LoongServeOptions
from headway.policy.placement.loongserve.times import BatchSum, ScalingTimes, length
from headway.policy.placement.view import ClusterSnapshot

FIRST_OUTPUT = 512
"""Output tokens of a request, before any has ended (the published code's)."""


class RunningPrefill:
    """A batch that is computed. `open`: its requests that are not done; `merged`: decode batches that wait for it."""

    __slots__ = ("group", "merged", "open", "requests")

    def __init__(self, group: tuple[int, ...], requests: Sequence[Request], merged: list[DecodeBatch]) -> None:
        self.group, self.merged = group, merged
        self.requests = {request.id: request for request in requests}
        self.open = set(self.requests)


class ElasticPool:
    """`ids`: its instances. `side`: where decodes go, when not to the pool itself."""

    def __init__(
        self,
        latency: GroupLatency,
        shape: ModelShape,
        options: LoongServeOptions,
        ids: Sequence[int],
        view: ClusterSnapshot,
        side: DecodeSide | None,
    ) -> None:
        self.ids = view.ordered(ids)
        self.pending: list[Request] = []
        self.prefills: list[RunningPrefill] = []
        self.decodes: list[DecodeBatch] = []
        self._options, self._shape, self._side = options, shape, side
        self._capacity = {i: view.instances[i].capacity for i in self.ids}
        self._node = {i: view.instances[i].node for i in self.ids}
        self.times = ScalingTimes(latency, [self._node[i] for i in self.ids], options.max_sp)
        self._prefill_of: dict[str, RunningPrefill] = {}
        self._home: dict[str, DecodeBatch] = {}
        self._leaving: dict[str, int] = {}
        self._spare: set[int] = set()
        self._until_s = 0.0
        self._outputs, self._ended = float(FIRST_OUTPUT), 1

    # -- what happens ---------------------------------------------------------------------------------------------

    def arrived(self, request: Request, view: ClusterSnapshot) -> list[Action]:
        """A request for this pool."""
        if self._side is None and reserve_of([request]) > room_of(list(self._capacity.values())):
            return [RejectRequest(request.id, "more tokens than all instances of its pool hold")]
        self.pending.append(request)
        return self.plan(view)

    def span_done(self, name: str, view: ClusterSnapshot) -> list[Action]:
        """A prompt is complete; its batch ends with it."""
        prefill = self._prefill_of.pop(name, None)
        if prefill is None:
            return []
        prefill.open.discard(name)
        return [] if prefill.open else self._prefilled(prefill, view)

    def kv_ready(self, name: str, view: ClusterSnapshot) -> list[Action]:
        """A request's KV has come to the batch that it was moved to."""
        self._leaving.pop(name, None)
        batch = self._home.get(name)
        if batch is None:
            return []
        batch.moving.discard(name)
        return [EnqueueRequest(name, batch.group, "decode"), *self.plan(view)]

    def ended(self, name: str, view: ClusterSnapshot, finished: bool) -> list[Action]:
        """A request is there no longer."""
        actions: list[Action] = []
        self.pending = [request for request in self.pending if request.id != name]
        self._leaving.pop(name, None)
        prefill = self._prefill_of.pop(name, None)
        if prefill is not None:
            prefill.open.discard(name)
            del prefill.requests[name]
            if not prefill.open:
                actions += self._prefilled(prefill, view)
        batch = self._home.pop(name, None)
        if batch is not None:
            request, _ = batch.members.pop(name)
            batch.moving.discard(name)
            if finished:
                self._outputs, self._ended = self._outputs + request.max_output_tokens, self._ended + 1
            if not batch.members and batch in self.decodes:
                self.decodes.remove(batch)
        return [*actions, *self.plan(view)]

    def withdrawn(self, name: str, view: ClusterSnapshot) -> list[Action]:
        """A batch was not committed after all: its requests wait again, in front."""
        prefill = self._prefill_of.get(name)
        if prefill is None:
            return []
        for other in prefill.requests:
            self._prefill_of.pop(other, None)
            if self._side is not None:
                self._side.withdraw(other)
        self.prefills.remove(prefill)
        self.pending = sorted([*prefill.requests.values(), *self.pending], key=lambda r: (r.arrival_s, r.id))
        return [action for batch in prefill.merged for action in self._go_on(batch)]

    @property
    def restless(self) -> bool:
        """Whether time alone may change what is to be done."""
        if self.pending and not self.prefills and not self._leaving:
            return True
        return any(batch.reserve > self._room(batch.group) for batch in self.decodes if not batch.paused)

    # -- rounds ---------------------------------------------------------------------------------------------------

    def plan(self, view: ClusterSnapshot) -> list[Action]:
        """All that can be done now."""
        if self._leaving:
            return []
        actions = self._grow(view)
        if not self.pending:
            return actions
        return actions + (self._fill(view) if self.prefills else self._round(view))

    def idle(self) -> list[int]:
        """Instances on which nothing is."""
        taken = {i for prefill in self.prefills for i in prefill.group} | set(self._leaving.values())
        taken.update(i for batch in self.decodes for i in batch.group)
        return [i for i in self.ids if i not in taken]

    def _round(self, view: ClusterSnapshot) -> list[Action]:
        now, step_s, idle = view.now_s, self._options.decode_step_s, self.idle()
        used = sum(batch.tokens(now, step_s) for batch in self.decodes)
        reserved = sum(batch.reserve for batch in self.decodes)
        chosen = dispatch(
            self.pending,
            self.times,
            self._options,
            instances=len(self.ids),
            capacity=min(c or UNLIMITED for c in self._capacity.values()),
            used=used,
            reserved=reserved if self._side is None else 0,
            decodes=[batch.made(name, now, step_s) for batch in self.decodes for name in batch.members],
            mean_output=self._outputs / self._ended,
        )
        if not chosen:
            return []
        lengths = [length(request) for request in chosen]
        if self._options.migrate and (moves := self._pack(lengths, idle, used, view)):
            return moves
        taken = self._take(lengths, idle, view) if self._options.preempt else []
        return self._begin(chosen, idle, taken, view, new=True)

    def _fill(self, view: ClusterSnapshot) -> list[Action]:
        """Prompts that end within the round, on instances that it has left."""
        left_s = self._until_s - view.now_s
        idle = [i for i in self.idle() if self._options.mode != "paper" or i in self._spare]
        if not idle or left_s <= 0:
            return []
        room, total, tokens = self._room(idle), BatchSum(self.times, len(idle)), 0
        chosen: list[Request] = []
        for request in self.pending:
            if self._options.prefill == "single" and len(chosen) == len(idle):
                break
            needed = reserve_of([request]) if self._side is None else 0
            mine = length(request)
            if tokens + needed <= room and total.with_one(mine) <= left_s:
                chosen.append(request)
                total.add(mine)
                tokens += needed
        return self._begin(chosen, idle, [], view, new=False) if chosen else []

    def _begin(
        self, chosen: list[Request], idle: list[int], taken: list[DecodeBatch], view: ClusterSnapshot, new: bool
    ) -> list[Action]:
        """Split, and commit."""
        room = {i: float(self._capacity[i] or UNLIMITED) for i in idle}
        for batch in taken:
            for i in batch.group:
                room[i] = float(self._room([i]) - batch.reserve / len(batch.group))
        order = [*idle, *(i for batch in taken for i in batch.group)]
        most = 1 if self._options.prefill == "single" else 0
        while chosen:
            if most:
                chosen = chosen[: len(order)]
            prompts = sorted(chosen, key=lambda r: (-length(r), r.arrival_s, r.id))
            found = partition(
                [length(r) for r in prompts], [room[i] for i in order], [self._node[i] for i in order],
                self.times.alone_s, most, self._options.max_sp,
            )  # fmt: skip
            if found is not None:
                break
            chosen = chosen[:-1]
        if not chosen:
            return []
        gone = {request.id for request in chosen}
        self.pending = [request for request in self.pending if request.id not in gone]
        actions: list[Action] = []
        longest_s = 0.0
        for first, last, start, stop in found or ():
            group = view.ordered(order[start:stop])
            members = prompts[first:last]
            longest_s = max(longest_s, self.times.batch_s([length(r) for r in members], len(group)))
            actions += self._commit(members, group, [b for b in taken if set(b.group) & set(group)], view)
        if new:
            self._until_s = view.now_s + longest_s
            self._spare = set(self.idle())
        return actions

    def _commit(
        self, requests: list[Request], group: tuple[int, ...], paused: list[DecodeBatch], view: ClusterSnapshot
    ) -> list[Action]:
        strategy = Strategy(attn="striped" if len(group) > 1 else "local")
        spans = [
            Span(request=r, start=r.cached_tokens, end=r.prompt_tokens, group=group, strategy=strategy)
            for r in requests
        ]  # fmt: skip
        prefill = RunningPrefill(group, requests, paused)
        self.prefills.append(prefill)
        self._prefill_of.update(dict.fromkeys(prefill.requests, prefill))
        actions: list[Action] = []
        for batch in paused:
            batch.paused = True
            actions += [PreemptRequest(name) for name in batch.members]
        actions.append(CommitSpans(requests[0].id, (spans[0],), view.version, along=tuple(spans[1:])))
        if self._side is not None:
            for request in requests:
                actions += self._side.place(request, [group], view)
        return actions

    def _prefilled(self, prefill: RunningPrefill, view: ClusterSnapshot) -> list[Action]:
        """Scale down: keep the instances that KV needs, and decode there."""
        self.prefills.remove(prefill)
        begin = [r for r in prefill.requests.values() if r.max_output_tokens > 1 and self._side is None]
        kept: tuple[int, ...] = ()
        actions: list[Action] = []
        if begin or any(batch.members for batch in prefill.merged):
            batch = DecodeBatch(self._keep(prefill, begin, view))
            for old in prefill.merged:
                batch.members.update(old.members)
            batch.members.update({r.id: (r, view.now_s) for r in begin})
            self._home.update(dict.fromkeys(batch.members, batch))
            self.decodes.append(batch)
            actions, kept = self._go_on(batch), batch.group
        self.decodes = [batch for batch in self.decodes if batch not in prefill.merged]
        if self._options.mode != "paper" or not kept:
            self._spare |= set(prefill.group) - set(kept)
        return actions + self.plan(view)

    def _keep(self, prefill: RunningPrefill, begin: list[Request], view: ClusterSnapshot) -> tuple[int, ...]:
        """Where paused decodes have KV, and as few more as hold the new one."""
        group = [i for batch in prefill.merged for i in batch.group]
        need = reserve_of(begin)
        if self._options.mode == "paper":  # but each request by itself must fit
            need = max(sum(r.prompt_tokens + 1 for r in begin), *(reserve_of([r]) for r in begin), 0)
        room = self._room(group) - sum(batch.reserve for batch in prefill.merged)
        for i in prefill.group:
            if i in group:
                continue
            if group and need <= room:
                break
            group.append(i)
            room += self._room([i])
        return view.ordered(group)

    # -- decodes --------------------------------------------------------------------------------------------------

    def _go_on(self, batch: DecodeBatch) -> list[Action]:
        """All of a batch decode on its group, whatever they did before."""
        batch.paused = False
        return [EnqueueRequest(name, batch.group, "decode") for name in batch.members if name not in batch.moving]

    def _grow(self, view: ClusterSnapshot) -> list[Action]:
        """Scale up decode batches whose KV or number asks for it (§4.2), by idle instances, else by merging."""
        now, options = view.now_s, self._options
        actions: list[Action] = []
        for batch in list(self.decodes):
            if batch not in self.decodes or batch.paused or batch.moving:
                continue
            before = batch.group
            crowded = len(batch.members) // len(batch.group) > options.decode_batch
            full = batch.reserve > self._room(before) and (
                batch.tokens(now, options.decode_step_s, 2 * options.wait_steps) > self._room(before)
            )
            if not (crowded or full):
                continue
            idle = self.idle()
            if idle:
                near = [i for i in idle if self._node[i] == self._node[before[0]]]
                batch.group = view.ordered([*before, (near or idle)[0]])
            elif full:
                self._merge(batch, view)
            if batch.group != before:
                actions += self._go_on(batch)
        return actions

    def _merge(self, batch: DecodeBatch, view: ClusterSnapshot) -> None:
        """With the batch that has most room."""
        others = [b for b in self.decodes if b is not batch and not b.paused and not b.moving]
        if others:
            other = max(others, key=lambda b: (self._room(b.group) - b.reserve, -b.group[0]))
            self.decodes.remove(other)
            batch.group = view.ordered([*batch.group, *other.group])
            batch.members.update(other.members)
            self._home.update(dict.fromkeys(other.members, batch))

    def _pack(self, lengths: list[int], idle: list[int], used: int, view: ClusterSnapshot) -> list[Action]:
        """Move the smallest decode batches to the fullest, while one more instance saves more than that takes."""
        now, step_s, actions, free = view.now_s, self._options.decode_step_s, list[Action](), len(idle)
        most = len(self.ids) - self._needed(used)
        small = [b for b in self.decodes if len(b.group) == 1 and not b.paused]
        small.sort(key=lambda b: (b.tokens(now, step_s), b.group))
        while small and free < most:
            source = small.pop(0)
            into = [b for b in self.decodes if b is not source and self._room(b.group) - b.reserve >= source.reserve]
            if not into:
                break
            target = max(into, key=lambda b: (b.tokens(now, step_s), -b.group[0]))
            if sum(lengths) <= self._room(idle) and free:
                saved_s = self.times.batch_s(lengths, free) - self.times.batch_s(lengths, free + 1)
                if saved_s < self._move_s(source.tokens(now, step_s), source.group[0], target.group[0], view):
                    break
            self.decodes.remove(source)
            for name in source.members:
                self._leaving[name] = source.group[0]
                target.moving.add(name)
                actions += [PreemptRequest(name), TransferKv(name, target.group[0])]
            target.members.update(source.members)
            self._home.update(dict.fromkeys(source.members, target))
            free += 1
        return actions

    def _move_s(self, tokens: int, source: int, target: int, view: ClusterSnapshot) -> float:
        at = view.instances
        count = tokens * self._shape.kv_bytes_per_token / at[source].tp
        return view.links.between(at[source], at[target]).transfer_s(int(count))

    def _take(self, lengths: list[int], idle: list[int], view: ClusterSnapshot) -> list[DecodeBatch]:
        """Decode batches to pause: until KV has room, then those whose loss is below the prompts' gain (Eq. 3, 4)."""
        now, step_s, taken = view.now_s, self._options.decode_step_s, list[DecodeBatch]()
        count, short = len(idle), sum(lengths) - self._room(idle)
        able = [b for b in self.decodes if len(b.group) == 1 and not b.paused and not b.moving and b.members]
        able.sort(key=lambda b: (b.reserve - self._room(b.group), b.group))
        for batch in able:
            if short <= 0 and count:
                more_s = self.times.batch_s(lengths, count + 1)
                gain = (self.times.batch_s(lengths, count) - more_s) * sum(1 / tokens for tokens in lengths)
                made = sum(batch.made(name, now, step_s) for name in batch.members)
                if gain < more_s * len(batch.members) ** 2 / made:
                    continue
            taken.append(batch)
            short -= self._room(batch.group) - batch.reserve
            count += 1
        return taken

    def _room(self, group: Iterable[int]) -> int:
        return room_of([self._capacity[i] for i in group])

    def _needed(self, used: int) -> int:
        """Instances that this much KV needs at least."""
        return math.ceil(used / min(c or UNLIMITED for c in self._capacity.values()))
