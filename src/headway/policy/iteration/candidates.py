"""Prefills that could take tokens now, most urgent first: those that hold KV, and those whose KV fits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from headway.policy.iteration.admission import KvBlockAdmission
from headway.policy.iteration.chunk_allocation import PackCandidate
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.prefill import WHOLE, PrefillState
from headway.policy.iteration.queue import WaitingQueue

MAX_BLOCKED = 32
"""Most requests without enough KV that one decision looks at: a bound on its time."""


class RemoteCost(NamedTuple):
    """What other KV groups add to a chunk of a request whose earlier shards they hold."""

    past: int
    """Tokens of the largest of these shards."""
    reserved_s: float
    """Seconds by which the busiest of these groups is ahead of the owner group, and the fixed exchange cost."""
    exchange_s_per_row: float
    """Seconds to exchange one row with all of these groups."""


class PrefillCandidates:
    """Candidates of one group.

    A request whose KV does not fit is skipped, and later ones enter before it. Once it has been skipped for
    `admission_age_s`, only short ones do, within the headroom that it leaves them. After `MAX_BLOCKED` skipped requests
    no further one enters in this iteration.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queue: WaitingQueue,
        admission: KvBlockAdmission,
        remote_cost: Callable[[str], RemoteCost] | None,
    ) -> None:
        # A long request of another group whose next shard has not fitted here for too long (`GroupedScheduler`).
        self.reserved_for: PrefillState | None = None
        # Whether no further long request is to be yielded in this decision, set by the caller: one gets tokens.
        self.long_taken = False
        self._config = config
        self._queue = queue
        self._admission = admission
        self._remote_cost = remote_cost

    def at(
        self, now: float, iterations: int, advanced: int, skip: Collection[str], admits_new: bool
    ) -> Iterator[PackCandidate]:
        """Yield candidates in order, lazily: the caller admits requests while it iterates.

        `iterations`: count so far; `advanced`: the last of them in which any prefill got tokens. `admits_new`: whether
        requests without KV may begin."""
        admission, queue = self._admission, self._queue
        admission.decide()
        decisions = admission.decisions
        self.long_taken = False
        holders, max_holders = admission.holders, self._config.max_num_seqs
        shares_prefixes, blocked = admission.shares_prefixes, 0
        # Whether no request without KV enters any more.
        closed = not admits_new or len(holders) >= max_holders
        # Blocks that shorts may take while a long request has waited too long; None: no such limit.
        spare = None if self.reserved_for is None else admission.spare_blocks(self.reserved_for)
        # Requests with KV that were looked at: by id, for prefixes that they compute, and by order of arrival.
        ahead, seen = set[str](), set[int]()
        for state in queue.ordered(now):
            holds_kv = state.holds_kv
            if closed and not holds_kv:
                if queue.begun_shorts or not self.long_taken:
                    yield from self._begun(now, iterations, skip, seen)
                return
            if skip and state.request.id in skip:
                continue
            if not holds_kv:
                if shares_prefixes and admission.waits_for_prefix(state, ahead):
                    continue
                if spare is not None and (state.is_long or admission.blocks(state) > spare):
                    blocked += 1
                    closed = blocked >= MAX_BLOCKED
                    continue
                # Mostly the pool's last answer still holds, and is too many.
                known = state.asked_again > decisions and state.needed_blocks > admission.free_blocks
                if known or not admission.fits(state):
                    blocked += 1
                    if state.skipped_since is None:
                        state.skipped_since = now
                    if now - state.skipped_since >= self._config.admission_age_s:
                        spare = admission.spare_blocks(state)
                    closed = blocked >= MAX_BLOCKED or spare == 0
                    continue
                if spare is not None:
                    spare -= admission.blocks(state)
            seen.add(state.order)
            if not (state.is_long and self.long_taken):
                # A request that has not begun counts from the last progress of any prefill: it is not stalled while
                # others advance.
                stalled = iterations - (state.last_progress if holds_kv else advanced)
                candidate = self._candidate(state, now, stalled)
                # 0: its shard is full and no group has taken over yet.
                if candidate.remaining > 0:
                    yield candidate
            # The caller may have admitted it.
            if shares_prefixes and state.holds_kv:
                ahead.add(state.request.id)
            # Re-read after the yield: the caller may have admitted this candidate.
            closed = closed or len(holders) >= max_holders

    def _begun(self, now: float, iterations: int, skip: Collection[str], seen: set[int]) -> Iterator[PackCandidate]:
        """Yield the candidates that hold KV, but those whose order of arrival is among `seen`."""
        for state in self._queue.begun_ordered(now):
            if state.order in seen or (state.is_long and self.long_taken) or state.request.id in skip:
                continue
            candidate = self._candidate(state, now, iterations - state.last_progress)
            if candidate.remaining > 0:
                yield candidate

    def _candidate(self, state: PrefillState, now: float, stalled: int) -> PackCandidate:
        """Return one prefill as `chunk_allocation` sees it."""
        name, remaining, past = state.request.id, state.remaining, state.scheduled
        # rho = (deadline - now - work left) / isolated time, as `ordering.relative_slack` (Medha §4.1).
        slack = (state.deadline_s - now - state.work_s) / max(state.total_s, 1e-9)
        yields = state.is_long and self._queue.yields_to_shorts(state)
        if state.limit == WHOLE:
            return PackCandidate(name, past, remaining, state.is_long, slack, stalled, yields=yields)
        room = state.room
        completes = remaining <= room
        # Within the shard: a chunk never crosses its edge, and attends from its first token on.
        remaining, past = min(remaining, room), past - state.base
        if not state.base or remaining <= 0 or self._remote_cost is None:
            return PackCandidate(name, past, remaining, state.is_long, slack, stalled, completes, yields=yields)
        remote = self._remote_cost(name)
        return PackCandidate(
            name,
            # Shards are attended concurrently: attention takes as long as over the largest.
            max(past, remote.past),
            remaining,
            state.is_long,
            slack,
            stalled,
            completes,
            remote.reserved_s,
            remote.exchange_s_per_row,
            yields,
        )
