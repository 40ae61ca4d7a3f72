"""The scheduler of one elastic pool of instances (LoongServe §5), and the decode batches that it pauses so that prompts
can begin.

Work goes in rounds (the published code's macro iterations). When no prefill runs, prompts are dispatched in order of
arrival (§5.1), instances are found for them, by packing or pausing decodes where that gains more than it costs (§5.2),
and dynamic programming splits both (§5.3). While the round lasts, prompts that end within it fill free instances,
whatever their place in the queue. A batch whose prefill ends keeps the instances that its KV needs and decodes there
(proactive scale-down, §4.1); more are added when KV or the number of requests asks for it (scale-up, §4.2).

Departures: KV moves between batches whole, over the simulator's links, and only from batches on one instance; only
those are paused; the output of a decoding request is estimated from the time since it began.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from headway.core.request import Request, Span, Strategy
from headway.perf.hardware import ModelShape
from headway.perf.latency.groups import GroupLatency
from headway.policy.placement.contract import (
    Action,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    PreemptRequest,
    RejectRequest,
    TransferKv,
    final_tokens,
    members_for,
)
from headway.policy.placement.kv_places import DecodePlacement, decode_instances
from headway_research.loongserve.batching import (
    UNLIMITED,
    BatchSum,
    DecodeBatch,
    LoongServeOptions,
    ScalingTimes,
    capacity_of,
    dispatch,
    final_tokens_of,
    length,
    partition,
    room_of,
)


def decodes_to_pause(
    decodes: Sequence[DecodeBatch],
    lengths: Sequence[int],
    idle: Sequence[int],
    capacity: Mapping[int, int],
    times: ScalingTimes,
    now: float,
    step_s: float,
) -> list[DecodeBatch]:
    """Return batches of `decodes` to pause: until the prompts' KV fits, then those whose loss is below the prompts'
    gain (Eq. 3, 4).

    lengths: of the prompts. idle: instances without work. capacity: KV tokens of each instance. step_s: assumed time of
    one decode step."""

    def room(group: Sequence[int]) -> int:
        return capacity_of([capacity[i] for i in group])

    taken: list[DecodeBatch] = []
    count, short = len(idle), sum(lengths) - room(idle)
    candidates = [b for b in decodes if len(b.group) == 1 and not b.paused and not b.migrating and b.members]
    candidates.sort(key=lambda b: (b.final_tokens - room(b.group), b.group))
    for batch in candidates:
        if short <= 0 and count:
            more_s = times.batch_s(lengths, count + 1)
            gain = (times.batch_s(lengths, count) - more_s) * sum(1 / tokens for tokens in lengths)
            generated = sum(batch.generated(name, now, step_s) for name in batch.members)
            # loss (Eq. 3): more_s * sum of 1 / output, with the batch's mean output: members * members / generated
            if gain < more_s * len(batch.members) ** 2 / generated:
                continue
        taken.append(batch)
        short -= room(batch.group) - batch.final_tokens
        count += 1
    return taken


FIRST_OUTPUT = 512
"""Assumed output tokens of a request before any has finished (the published code's)."""


class RunningPrefill:
    """A batch of prompts that is computed."""

    __slots__ = ("group", "paused_decodes", "requests", "unfinished")

    def __init__(self, group: tuple[int, ...], requests: Sequence[Request], paused_decodes: list[DecodeBatch]) -> None:
        self.group = group
        self.paused_decodes = paused_decodes  # decode batches of these instances, which join it when it ends
        self.requests = {request.id: request for request in requests}
        self.unfinished = set(self.requests)


class ElasticPool:
    """Queue, prefill batches and decode batches of one pool."""

    def __init__(
        self,
        latency: GroupLatency,
        shape: ModelShape,
        options: LoongServeOptions,
        ids: Sequence[int],
        view: ClusterSnapshot,
        decode_placement: DecodePlacement | None,
    ) -> None:
        """ids: instances of the pool. decode_placement: None: requests decode in the pool."""
        self.ids = view.ordered(ids)
        self.pending: list[Request] = []
        self.prefills: list[RunningPrefill] = []
        self.decodes: list[DecodeBatch] = []
        self._options, self._shape, self._decode_placement = options, shape, decode_placement
        self._capacity = {i: view.instances[i].capacity for i in self.ids}
        self._least = min(self._capacity.values())
        self._node = {i: view.instances[i].node for i in self.ids}
        self.times = ScalingTimes(latency, [self._node[i] for i in self.ids], options.max_sp)
        self._prefill_of: dict[str, RunningPrefill] = {}
        self._decode_batch_of: dict[str, DecodeBatch] = {}
        self._migrating_from: dict[str, int] = {}  # instance that each migrating request leaves
        self._spare: set[int] = set()  # instances that the round left idle, or whose batch has ended
        self._round_end_s = 0.0
        # sum and number of outputs, for their mean, begun with an assumed one
        self._finished_output, self._finished_count = float(FIRST_OUTPUT), 1

    # -- events ---------------------------------------------------------------------------------------------------

    def add(self, request: Request, view: ClusterSnapshot) -> list[Action]:
        """Add a request that has arrived."""
        if self._decode_placement is None and final_tokens_of([request]) > capacity_of(list(self._capacity.values())):
            return [RejectRequest(request.id, "more tokens than all instances of its pool hold")]
        self.pending.append(request)
        return self.plan(view)

    def span_done(self, name: str, view: ClusterSnapshot) -> list[Action]:
        """Record that a prompt is complete; with the last one of its batch the batch ends."""
        prefill = self._prefill_of.pop(name, None)
        if prefill is None:
            return []
        prefill.unfinished.discard(name)
        return [] if prefill.unfinished else self._prefilled(prefill, view)

    def kv_ready(self, name: str, view: ClusterSnapshot) -> list[Action]:
        """Let a request decode whose KV has arrived at the batch to which it migrates."""
        self._migrating_from.pop(name, None)
        batch = self._decode_batch_of.get(name)
        if batch is None:
            return []
        batch.migrating.discard(name)
        return [EnqueueRequest(name, batch.group, "decode"), *self.plan(view)]

    def remove(self, name: str, view: ClusterSnapshot, finished: bool) -> list[Action]:
        """Remove a request that has finished or was dropped."""
        actions: list[Action] = []
        self.pending = [request for request in self.pending if request.id != name]
        self._migrating_from.pop(name, None)
        prefill = self._prefill_of.pop(name, None)
        if prefill is not None:
            prefill.unfinished.discard(name)
            del prefill.requests[name]
            if not prefill.unfinished:
                actions += self._prefilled(prefill, view)
        batch = self._decode_batch_of.pop(name, None)
        if batch is not None:
            request, _ = batch.members.pop(name)
            batch.migrating.discard(name)
            if finished:
                self._finished_output, self._finished_count = (
                    self._finished_output + request.max_output_tokens,
                    self._finished_count + 1,
                )
            if not batch.members and batch in self.decodes:
                self.decodes.remove(batch)
        return [*actions, *self.plan(view)]

    def withdraw(self, name: str, view: ClusterSnapshot) -> list[Action]:
        """Undo a refused commitment: the batch's requests wait again, in order of arrival."""
        prefill = self._prefill_of.get(name)
        if prefill is None:
            return []
        for other in prefill.requests:
            self._prefill_of.pop(other, None)
            if self._decode_placement is not None:
                self._decode_placement.withdraw(other)
        self.prefills.remove(prefill)
        self.pending = sorted([*prefill.requests.values(), *self.pending], key=lambda r: (r.arrival_s, r.id))
        return [action for batch in prefill.paused_decodes for action in self._resume_decodes(batch)]

    @property
    def needs_wakeup(self) -> bool:
        """Whether the passing of time alone may change the decisions."""
        if self.pending and not self.prefills and not self._migrating_from:
            return True
        return any(batch.final_tokens > self._capacity_of(batch.group) for batch in self.decodes if not batch.paused)

    # -- rounds ---------------------------------------------------------------------------------------------------

    def plan(self, view: ClusterSnapshot) -> list[Action]:
        """Return everything that can be done now; nothing while requests migrate."""
        if self._migrating_from:
            return []
        actions = self._scale_up_decodes(view)
        if not self.pending:
            return actions
        return actions + (self._fill_round(view) if self.prefills else self._start_round(view))

    def idle(self) -> list[int]:
        """Return the instances without prefills and decodes."""
        taken = {i for prefill in self.prefills for i in prefill.group} | set(self._migrating_from.values())
        taken.update(i for batch in self.decodes for i in batch.group)
        return [i for i in self.ids if i not in taken]

    def _start_round(self, view: ClusterSnapshot) -> list[Action]:
        """Dispatch prompts, migrate or pause decodes for them, and commit them."""
        now, step_s, preempt, idle = view.now_s, self._options.decode_step_s, self._options.preempt, self.idle()
        used = sum(batch.tokens(now, step_s) for batch in self.decodes)
        reserved = sum(batch.final_tokens for batch in self.decodes)
        chosen = dispatch(
            self.pending,
            self.times,
            self._options,
            instances=len(self.ids),
            capacity=min(c or UNLIMITED for c in self._capacity.values()),
            used=used,
            reserved=reserved if self._decode_placement is None else 0,
            decodes=[batch.generated(name, now, step_s) for batch in self.decodes for name in batch.members],
            mean_output=self._finished_output / self._finished_count,
        )
        if not chosen:
            return []
        lengths = [length(request) for request in chosen]
        # the round begins when the KV has arrived: nothing is planned while requests migrate
        if self._options.migrate and (moves := self._migrate_decodes(lengths, idle, used, view)):
            return moves
        taken = (
            decodes_to_pause(self.decodes, lengths, idle, self._capacity, self.times, now, step_s) if preempt else []
        )
        return self._partition(chosen, idle, taken, view, new=True)

    def _fill_round(self, view: ClusterSnapshot) -> list[Action]:
        """Commit prompts that end within the round, on instances without work."""
        left_s = self._round_end_s - view.now_s
        idle = [i for i in self.idle() if self._options.mode != "paper" or i in self._spare]
        if not idle or left_s <= 0:
            return []
        room, total, tokens = self._capacity_of(idle), BatchSum(self.times, len(idle)), 0
        chosen: list[Request] = []
        # out of order: short prompts fill the gaps that longer ones before them leave
        for request in self.pending:
            if self._options.prefill == "single" and len(chosen) == len(idle):
                break
            needed = final_tokens_of([request]) if self._decode_placement is None else 0
            prompt_tokens = length(request)
            if tokens + needed <= room and total.with_one(prompt_tokens) <= left_s:
                chosen.append(request)
                total.add(prompt_tokens)
                tokens += needed
        return self._partition(chosen, idle, [], view, new=False) if chosen else []

    def _partition(
        self, chosen: list[Request], idle: list[int], taken: list[DecodeBatch], view: ClusterSnapshot, new: bool
    ) -> list[Action]:
        """Split prompts over instances, and commit the batches. taken: decode batches to pause for them."""
        room = {i: float(self._capacity[i] or UNLIMITED) for i in idle}
        for batch in taken:
            for i in batch.group:
                # paused decodes keep their KV, spread evenly, and need space for the rest of their output
                room[i] = float(self._capacity_of([i]) - batch.final_tokens / len(batch.group))
        # instances without KV first (§5.3)
        order = [*idle, *(i for batch in taken for i in batch.group)]
        most = 1 if self._options.prefill == "single" else 0
        while chosen:
            if most:
                chosen = chosen[: len(order)]
            prompts = sorted(chosen, key=lambda r: (-length(r), r.arrival_s, r.id))
            found = partition(
                [length(r) for r in prompts], [room[i] for i in order], [self._node[i] for i in order],
                self.times.alone_s, most, self._options.max_sp, [self._kv_of(r) for r in prompts],
            )  # fmt: skip
            if found is not None:
                break
            # no split has space for all: leave out the latest arrival
            chosen = chosen[:-1]
        if not chosen:
            return []
        begun = {request.id for request in chosen}
        self.pending = [request for request in self.pending if request.id not in begun]
        actions: list[Action] = []
        longest_s = 0.0
        for first, last, start, stop in found or ():
            group = view.ordered(order[start:stop])
            members = prompts[first:last]
            longest_s = max(longest_s, self.times.batch_s([length(r) for r in members], len(group)))
            actions += self._commit(members, group, [b for b in taken if set(b.group) & set(group)], view)
        if new:
            # only a new round sets the end: prompts that fill gaps must not extend it
            self._round_end_s = view.now_s + longest_s
            self._spare = set(self.idle())
        return actions

    def _kv_of(self, request: Request) -> int:
        """Return the KV tokens of a prompt; of one that no instance holds alone, those of whole instances."""
        alone = members_for(final_tokens(request), self._least) == 1
        return length(request) if alone else room_of([request], self._least)

    def _decodes_here(self, request: Request, view: ClusterSnapshot) -> bool:
        return self._decode_placement is None or not decode_instances(view, final_tokens(request))

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
            # decodes stop before the batch that takes their instances is committed
            batch.paused = True
            actions += [PreemptRequest(name) for name in batch.members]
        actions.append(CommitSpans(requests[0].id, (spans[0],), view.version, batched_with=tuple(spans[1:])))
        if self._decode_placement is not None:
            for request in requests:
                if not self._decodes_here(request, view):
                    actions += self._decode_placement.place(request, [group], view)
        return actions

    def _prefilled(self, prefill: RunningPrefill, view: ClusterSnapshot) -> list[Action]:
        """Scale down a complete batch: keep the instances that its KV needs, and decode there."""
        self.prefills.remove(prefill)
        begin = [r for r in prefill.requests.values() if r.max_output_tokens > 1 and self._decodes_here(r, view)]
        kept: tuple[int, ...] = ()
        actions: list[Action] = []
        if begin or any(batch.members for batch in prefill.paused_decodes):
            batch = DecodeBatch(self._keep(prefill, begin, view))
            for old in prefill.paused_decodes:
                # decodes that were paused for the prefill go on in the new batch
                batch.members.update(old.members)
            batch.members.update({r.id: (r, view.now_s) for r in begin})
            self._decode_batch_of.update(dict.fromkeys(batch.members, batch))
            self.decodes.append(batch)
            actions, kept = self._resume_decodes(batch), batch.group
        self.decodes = [batch for batch in self.decodes if batch not in prefill.paused_decodes]
        if self._options.mode != "paper" or not kept:
            self._spare |= set(prefill.group) - set(kept)
        return actions + self.plan(view)

    def _keep(self, prefill: RunningPrefill, begin: list[Request], view: ClusterSnapshot) -> tuple[int, ...]:
        """Return the instances on which a complete batch decodes: those with KV of the decodes that were paused for it,
        and as few more as hold its own KV. begin: requests of the batch that decode here."""
        group = [i for batch in prefill.paused_decodes for i in batch.group]
        need = room_of(begin, self._least)
        if self._options.mode == "paper":  # but each request by itself must fit
            # the published code keeps space for the prompts and one token of each
            need = max(sum(r.prompt_tokens + 1 for r in begin), *(room_of([r], self._least) for r in begin), 0)
        room = self._capacity_of(group) - sum(batch.final_tokens for batch in prefill.paused_decodes)
        for i in prefill.group:
            if i in group:
                continue
            if group and need <= room:
                break
            group.append(i)
            room += self._capacity_of([i])
        return view.ordered(group)

    # -- decodes --------------------------------------------------------------------------------------------------

    def _resume_decodes(self, batch: DecodeBatch) -> list[Action]:
        """Let all members of a batch decode on its group."""
        batch.paused = False
        return [EnqueueRequest(name, batch.group, "decode") for name in batch.members if name not in batch.migrating]

    def _scale_up_decodes(self, view: ClusterSnapshot) -> list[Action]:
        """Scale up decode batches that lack KV or compute (§4.2): add an idle instance, else merge."""
        now, options = view.now_s, self._options
        actions: list[Action] = []
        # a copy: a merge removes batches from the list
        for batch in list(self.decodes):
            if batch not in self.decodes or batch.paused or batch.migrating:
                continue
            before = batch.group
            crowded = len(batch.members) // len(batch.group) > options.decode_batch
            full = batch.final_tokens > self._capacity_of(before) and (
                batch.tokens(now, options.decode_step_s, 2 * options.wait_steps) > self._capacity_of(before)
            )
            if not (crowded or full):
                continue
            idle = self.idle()
            if idle:
                # on the batch's node if possible
                near = [i for i in idle if self._node[i] == self._node[before[0]]]
                batch.group = view.ordered([*before, (near or idle)[0]])
            elif full:
                self._merge_decodes(batch, view)
            if batch.group != before:
                actions += self._resume_decodes(batch)
        return actions

    def _merge_decodes(self, batch: DecodeBatch, view: ClusterSnapshot) -> None:
        """Merge a batch with the one that has most free KV."""
        others = [b for b in self.decodes if b is not batch and not b.paused and not b.migrating]
        if others:
            other = max(others, key=lambda b: (self._capacity_of(b.group) - b.final_tokens, -b.group[0]))
            self.decodes.remove(other)
            batch.group = view.ordered([*batch.group, *other.group])
            batch.members.update(other.members)
            self._decode_batch_of.update(dict.fromkeys(other.members, batch))

    def _migrate_decodes(self, lengths: list[int], idle: list[int], used: int, view: ClusterSnapshot) -> list[Action]:
        """Migrate the smallest decode batches to the fullest, while one more instance saves more than the migration
        takes."""
        now, step_s, actions, free = view.now_s, self._options.decode_step_s, list[Action](), len(idle)
        # instances that can be free when all decodes' KV is packed
        most = len(self.ids) - self._instances_for(used)
        small = [b for b in self.decodes if len(b.group) == 1 and not b.paused]
        # the smallest first: each frees an instance for the least KV moved
        small.sort(key=lambda b: (b.tokens(now, step_s), b.group))
        while small and free < most:
            source = small.pop(0)
            into = [
                b
                for b in self.decodes
                if b is not source and self._capacity_of(b.group) - b.final_tokens >= source.final_tokens
            ]
            if not into:
                break
            target = max(into, key=lambda b: (b.tokens(now, step_s), -b.group[0]))
            if sum(lengths) <= self._capacity_of(idle) and free:
                saved_s = self.times.batch_s(lengths, free) - self.times.batch_s(lengths, free + 1)
                if saved_s < self._migration_s(source.tokens(now, step_s), source.group[0], target.group[0], view):
                    break
            self.decodes.remove(source)
            for name in source.members:
                self._migrating_from[name] = source.group[0]
                target.migrating.add(name)
                actions += [PreemptRequest(name), TransferKv(name, target.group[0])]
            target.members.update(source.members)
            self._decode_batch_of.update(dict.fromkeys(source.members, target))
            free += 1
        return actions

    def _migration_s(self, tokens: int, source: int, target: int, view: ClusterSnapshot) -> float:
        """Return the seconds to move KV between two instances."""
        instances = view.instances
        count = tokens * self._shape.kv_bytes_per_token / instances[source].tp
        return view.links.between(instances[source], instances[target]).transfer_s(int(count))

    def _capacity_of(self, group: Iterable[int]) -> int:
        return capacity_of([self._capacity[i] for i in group])

    def _instances_for(self, used: int) -> int:
        """Return the fewest instances that hold so many KV tokens."""
        return math.ceil(used / min(c or UNLIMITED for c in self._capacity.values()))
