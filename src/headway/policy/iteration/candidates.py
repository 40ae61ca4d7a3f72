"""Prefills that could take tokens now, most urgent first: those that hold KV, and those whose KV fits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

from headway.core.request import BACKGROUND_PRIORITY
from headway.policy.iteration.admission import KvBlockAdmission
from headway.policy.iteration.chunk_allocation import PackCandidate
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.prefill import LONG, ONE_ITERATION, WHOLE, PrefillState
from headway.policy.iteration.queue import SizeBound, WaitingQueue

BACKGROUND_EVERY: Final = 128
"""Iterations of other work after which a background request has tokens in one of them, where it otherwise has
iterations of its own: fewer than 1 in 100 gaps between tokens of other requests are longer for it."""
MAX_BLOCKED: Final = 32
"""Most requests without enough KV that one decision looks at: a bound on its time."""
_NO_LIMIT: Final = float("inf")


class RemoteCost(NamedTuple):
    """What other KV groups add to a chunk of a request whose earlier shards they hold."""

    past: int
    """Tokens of the largest of these shards."""
    reserved_s: float
    """Seconds by which the busiest of these groups is ahead of the owner group, and the fixed exchange cost."""
    exchange_s_per_row: float
    """Seconds to exchange one row with all of these groups."""


class BlockedRun:
    """The most urgent requests without KV, all those that a decision looked at: the pool had room for none of them."""

    __slots__ = ("asks_at", "changes", "closes", "least_blocks", "members", "until_s")

    def __init__(self, members: list[PrefillState], changes: int, until_s: float, closes: bool) -> None:
        self.members = members
        # `WaitingQueue.waiting_changes` then.
        self.changes = changes
        # When another request may have become more urgent than these, or one of them has waited too long.
        self.until_s = until_s
        # Whether it is one request, which has waited too long, so that short ones pass it only within its headroom.
        self.closes = closes
        # Before this decision, and with fewer free blocks than that, `asked` is known to be empty.
        self.asks_at = self.least_blocks = 0

    def asked(self, decisions: int, free: int) -> list[PrefillState]:
        """Return the members that could fit into so many free blocks, or that the pool is asked about again."""
        if decisions < self.asks_at and free < self.least_blocks:
            return []
        found = [s for s in self.members if s.asked_again <= decisions or s.needed_blocks <= free]
        if not found:
            self.asks_at = min(state.asked_again for state in self.members)
            self.least_blocks = min(state.needed_blocks for state in self.members)
        return found


class _CandidateWalk:
    """One decision's way through the queue."""

    __slots__ = (
        "advanced", "all_fit", "blocked", "closed", "iterations", "now", "run", "seen", "sizes", "skip", "smaller",
        "spare",
    )  # fmt: skip

    def __init__(self, now: float, iterations: int, advanced: int, skip: Collection[str]) -> None:
        self.now = now
        self.iterations = iterations
        self.advanced = advanced
        self.skip = skip
        # Members that do not yield and were not looked at yet.
        self.smaller = 0
        # Whether the pool has room for any member.
        self.all_fit = False
        # Sizes of members that are looked at.
        self.sizes = SizeBound()
        # Requests that were looked at, by order of arrival, and how many of them were blocked.
        self.seen: set[int] = set()
        self.blocked = 0
        # Whether no request without KV enters any more.
        self.closed = False
        # Blocks that shorts may take while a long request has waited too long; None: no such limit.
        self.spare: int | None = None
        # Requests for which there was no room, while there was for none; None: they are not kept.
        self.run: list[PrefillState] | None = None


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
        background_s: Callable[[float, bool], float],
    ) -> None:
        """`background_s`: see `IterationBudget.background_s`."""
        # A long request of another group whose next shard has not fitted here for too long (`GroupedScheduler`).
        self.reserved_for: PrefillState | None = None
        # Whether no further long request is to be yielded in this decision, set by the caller: one gets tokens.
        self.long_taken = False
        # Whether requests that yield find no time in this decision, set by the caller.
        self._passes_over = False
        # The smallest size of requests that yield, set by the caller before candidates are taken (`pack`).
        self.yields_from = LONG + 1
        self._config = config
        self._queue = queue
        self._admission = admission
        self._remote_cost = remote_cost
        self._background_s = background_s
        # None: some request without KV may enter.
        self._run: BlockedRun | None = None

    def at(
        self, now: float, iterations: int, advanced: int, skip: Collection[str], admits_new: bool
    ) -> Iterable[PackCandidate]:
        """Return candidates in order, lazily: the caller admits requests while it iterates. (): there are none.

        `iterations`: count so far; `advanced`: the last of them in which any prefill got tokens. `admits_new`: whether
        requests without KV may begin."""
        admission = self._admission
        self.long_taken = self._passes_over = False
        # No request without KV enters.
        if not admits_new or len(admission.holders) >= self._config.max_num_seqs:
            return self._begun(now, iterations, skip, ())
        run = self._run
        if run is not None and not skip and self.reserved_for is None:
            if run.changes == self._queue.waiting_changes and now < run.until_s:
                asked = run.asked(admission.decisions, admission.free_blocks)
                if not (run.closes and (asked or admission.spare_blocks(run.members[0]))):
                    if not asked:
                        return self._begun(now, iterations, (), ()) if self._queue.begun else ()
                    return self._behind(run, asked, _CandidateWalk(now, iterations, advanced, ()))
            self._run = None
        return self._in_order(_CandidateWalk(now, iterations, advanced, skip))

    def pass_over(self, yielding: bool) -> None:
        """Set whether requests that yield find no time in this decision (`pack`)."""
        # By size only where all have the same priority: larger ones do not yield to smaller ones of a lower one.
        self._passes_over = yielding and not self._queue.prioritised

    def _gets_nothing(self, state: PrefillState) -> bool:
        """Whether a request gets no tokens in this decision, however little it asks for."""
        return (self._passes_over and state.size >= self.yields_from) or (self.long_taken and state.size == LONG)

    def _behind(self, run: BlockedRun, asked: list[PrefillState], walk: _CandidateWalk) -> Iterator[PackCandidate]:
        """Yield candidates: only those of `run` that are `asked` about may fit, to the others answers still apply."""
        admission, queue, now = self._admission, self._queue, walk.now
        in_order = sorted([*queue.begun.values(), *asked], key=lambda state: queue.key(state, now))
        for state in in_order:
            if not state.holds_kv:
                if admission.fits(state):
                    key = queue.key(state, now)
                    before = [s.order for s in run.members if queue.key(s, now) < key]
                    walk.blocked = len(before)
                    walk.seen.update(before)
                    self._run = None
                    yield from self._in_order(walk)
                    return
                continue
            walk.seen.add(state.order)
            if not self._gets_nothing(state):
                candidate = self._candidate(state, now, walk.iterations - state.last_progress)
                if candidate.remaining > 0:
                    yield candidate

    def _in_order(self, walk: _CandidateWalk) -> Iterator[PackCandidate]:
        """Yield candidates of the whole queue, but those that `walk` has seen."""
        admission, queue, skip, seen = self._admission, self._queue, walk.skip, walk.seen
        holders, max_holders = admission.holders, self._config.max_num_seqs
        shares_prefixes = admission.shares_prefixes
        if self.reserved_for is not None:
            walk.spare = admission.spare_blocks(self.reserved_for)
        if not (seen or shares_prefixes or skip or self.reserved_for is not None):
            walk.run = []
        walk.smaller = sum(queue.sizes[: self.yields_from])
        # Requests with KV that were looked at, for prefixes that they compute.
        ahead = set[str]()
        for state in queue.ordered(walk.now, walk.sizes):
            walk.smaller -= state.size < self.yields_from
            if state.order in seen:
                continue
            holds_kv = state.holds_kv
            if walk.closed and not holds_kv:
                if not self.long_taken or any(queue.begun_sizes[:LONG]):
                    yield from self._begun(walk.now, walk.iterations, skip, seen)
                return
            if skip and state.request.id in skip:
                continue
            waits = not holds_kv and shares_prefixes and admission.waits_for_prefix(state, ahead)
            if waits or not (holds_kv or self._has_room(state, walk)):
                continue
            seen.add(state.order)
            if not self._gets_nothing(state):
                candidate = self._candidate(state, walk.now, self._stalled(state, walk))
                # 0: its shard is full and no group has taken over yet.
                if candidate.remaining > 0:
                    yield candidate
            # The caller may have admitted it.
            if shares_prefixes and state.holds_kv:
                ahead.add(state.request.id)
            # Re-read after the yield: the caller may have admitted this candidate.
            walk.closed = walk.closed or len(holders) >= max_holders
            if self._leaves_out_yielding(walk):
                if not walk.smaller:
                    return
                walk.sizes.below = self.yields_from
            else:
                walk.sizes.below = LONG + 1
        self._remember(walk)

    def _leaves_out_yielding(self, walk: _CandidateWalk) -> bool:
        """Whether requests that yield get nothing, and nothing is to be noted of them: the pool has room for any."""
        # Of those with KV, others may wait for prefixes that they compute.
        waited_for = self._admission.shares_prefixes and any(self._queue.begun_sizes[self.yields_from :])
        if waited_for or not self._passes_over:
            return False
        if not walk.all_fit and walk.spare is None:
            walk.all_fit = self._admission.all_fit(self._queue.most_known)
        return walk.all_fit

    @staticmethod
    def _stalled(state: PrefillState, walk: _CandidateWalk) -> int:
        # A request that has not begun counts from the last progress of any prefill: it is not stalled while others
        # advance.
        counts = state.holds_kv or state.request.priority >= BACKGROUND_PRIORITY
        return walk.iterations - (state.last_progress if counts else walk.advanced)

    def _has_room(self, state: PrefillState, walk: _CandidateWalk) -> bool:
        """Whether a request without KV may begin: its KV fits, and none that has waited too long for KV is ahead."""
        admission, now = self._admission, walk.now
        if walk.spare is not None and (state.size == LONG or admission.blocks(state) > walk.spare):
            walk.blocked += 1
            walk.closed = walk.blocked >= MAX_BLOCKED
            return False
        # Mostly the pool's last answer still holds, and is too many.
        known = state.asked_again > admission.decisions and state.needed_blocks > admission.free_blocks
        if not known and admission.fits(state):
            walk.run = None
            if walk.spare is not None:
                walk.spare -= admission.blocks(state)
            return True
        walk.blocked += 1
        if state.skipped_since is None:
            state.skipped_since = now
        if now - state.skipped_since >= self._config.admission_age_s:
            walk.spare = admission.spare_blocks(state)
            if walk.spare or walk.run:
                walk.run = None
        if walk.run is not None:
            walk.run.append(state)
        walk.closed = walk.blocked >= MAX_BLOCKED or walk.spare == 0
        if walk.closed:
            self._remember(walk)
        return False

    def _remember(self, walk: _CandidateWalk) -> None:
        """Keep the requests that were blocked, for the next decision, where answers of the pool hold that long."""
        run, now, walk.run = walk.run, walk.now, None
        if not run or not self._admission.answers_hold:
            return
        queue = self._queue
        closes, until_s = walk.spare is not None, queue.first_until(run, now)
        if not closes:
            oldest_s = min(state.skipped_since or 0.0 for state in run)
            until_s = min(until_s, oldest_s + self._config.admission_age_s - 1e-6)
        if until_s > now:
            self._run = BlockedRun(run, queue.waiting_changes, until_s, closes)

    def _begun(
        self, now: float, iterations: int, skip: Collection[str], seen: Collection[int]
    ) -> Iterator[PackCandidate]:
        """Yield the candidates that hold KV, but those whose order of arrival is among `seen`."""
        for state in self._queue.begun_ordered(now):
            if state.order in seen or self._gets_nothing(state) or state.request.id in skip:
                continue
            candidate = self._candidate(state, now, iterations - state.last_progress)
            if candidate.remaining > 0:
                yield candidate

    def _candidate(self, state: PrefillState, now: float, stalled: int) -> PackCandidate:
        """Return one prefill as `chunk_allocation` sees it."""
        request, remaining, past = state.request, state.remaining, state.scheduled
        # rho = (deadline - now - work left) / isolated time, as `ordering.relative_slack` (Medha §4.1).
        slack = (state.deadline_s - now - state.work_s) / max(state.total_s, 1e-9)
        yields = state.size > ONE_ITERATION and self._queue.yields(state)
        alone, longest_s = False, _NO_LIMIT
        if request.priority >= BACKGROUND_PRIORITY:
            alone = self._config.interruptible_layers > 0 and stalled < BACKGROUND_EVERY
            longest_s = self._background_s(now, alone)
        completes, reserved_s, exchange_s = True, 0.0, 0.0
        if state.limit != WHOLE:
            completes = remaining <= state.room
            # Within the shard: a chunk never crosses its edge, and attends from its first token on.
            remaining, past = min(remaining, state.room), past - state.base
            if state.base and remaining > 0 and self._remote_cost is not None:
                remote = self._remote_cost(request.id)
                # Shards are attended concurrently: attention takes as long as over the largest.
                past, reserved_s, exchange_s = max(past, remote.past), remote.reserved_s, remote.exchange_s_per_row
        return PackCandidate(
            request.id, past, remaining, state.size, slack, stalled, completes, reserved_s, exchange_s, yields,
            longest_s, alone, state.interrupted if alone else 0,
        )  # fmt: skip
