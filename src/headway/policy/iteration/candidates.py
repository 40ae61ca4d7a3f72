"""Which waiting prefills could take tokens now: those that have begun, and those that may begin, most urgent first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from headway.policy.iteration.admission import KvBlockAdmission
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.packer import PackCandidate
from headway.policy.iteration.prefill import WHOLE, PrefillState
from headway.policy.iteration.queue import WaitingQueue

MAX_BLOCKED = 32
"""How many waiting requests one decision tries to find KV for in vain: a bound on its time."""


class RemoteCost(NamedTuple):
    """What other KV groups add to a chunk of a request whose earlier shards they hold."""

    past: int  # tokens of the largest of these shards
    reserved_s: float  # what the busiest of these groups leaves less of the iteration
    exchange_s_per_row: float


class PrefillCandidates:
    """Of one group.

    A request whose KV does not fit is skipped, not waited for, until it has been skipped for `admission_age_s`: then
    only short ones enter before it does, within the headroom that it leaves them. After `MAX_BLOCKED` such requests
    none enters in this iteration.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queue: WaitingQueue,
        admission: KvBlockAdmission,
        remote_cost: Callable[[str], RemoteCost] | None,
    ) -> None:
        self.reserved_for: PrefillState | None = None  # a long request of another group, skipped here for too long
        self._config = config
        self._queue = queue
        self._admission = admission
        self._remote_cost = remote_cost

    def at(
        self, now: float, iterations: int, advanced: int, skip: Collection[str], admits_new: bool
    ) -> Iterator[PackCandidate]:
        """Candidates in order, to be consumed lazily while requests are admitted. `advanced`: the iteration, of so
        many, in which any prefill got tokens last."""
        admission = self._admission
        begun, blocked = self._queue.begun, 0
        closed = not admits_new or len(admission.holders) >= self._config.max_num_seqs
        spare = None if self.reserved_for is None else admission.spare_blocks(self.reserved_for)
        for state in self._queue.ordered(now):
            if state.holds_kv:
                begun -= 1
            elif closed:
                if not begun:
                    return  # neither can anything else begin, nor does anything that has begun follow
                continue
            if skip and state.request.id in skip:
                continue
            if not state.holds_kv:
                if spare is not None and (state.is_long or admission.blocks(state) > spare):
                    blocked += 1
                    closed = blocked >= MAX_BLOCKED
                    continue
                if not admission.fits(state):
                    blocked += 1
                    if self._skipped_too_long(state, now):
                        spare = admission.spare_blocks(state)
                    closed = blocked >= MAX_BLOCKED or spare == 0
                    continue
                if spare is not None:
                    spare -= admission.blocks(state)
            stalled = iterations - (state.last_progress if state.holds_kv else advanced)
            candidate = self._candidate(state, now, stalled)
            if candidate.remaining > 0:  # else its shard is full, and no group has taken over
                yield candidate
            closed = closed or len(admission.holders) >= self._config.max_num_seqs

    def _candidate(self, state: PrefillState, now: float, stalled: int) -> PackCandidate:
        name, remaining, past = state.request.id, state.remaining, state.scheduled
        slack = (state.deadline_s - now - state.work_s) / max(state.total_s, 1e-9)
        if state.limit == WHOLE:
            return PackCandidate(name, past, remaining, state.is_long, slack, stalled)
        room = state.room
        completes = remaining <= room
        remaining, past = min(remaining, room), past - state.base
        if not state.base or remaining <= 0 or self._remote_cost is None:
            return PackCandidate(name, past, remaining, state.is_long, slack, stalled, completes)
        remote = self._remote_cost(name)
        return PackCandidate(
            name,
            max(past, remote.past),  # attention takes as long as over the largest shard
            remaining,
            state.is_long,
            slack,
            stalled,
            completes,
            remote.reserved_s,
            remote.exchange_s_per_row,
        )

    def _skipped_too_long(self, state: PrefillState, now: float) -> bool:
        """Note that a request has been passed over for want of KV, and tell whether that has gone on for too long."""
        if state.skipped_since is None:
            state.skipped_since = now
        return now - state.skipped_since >= self._config.admission_age_s
