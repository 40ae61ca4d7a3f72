"""Which waiting prefills could take tokens now: who has begun, and who may begin, most urgent first."""

from __future__ import annotations

from collections.abc import Iterator

from headway.policy.iteration.admission import KvBlockAdmission
from headway.policy.iteration.base import NeighbourGroups
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.packer import PackCandidate
from headway.policy.iteration.queue import WaitingQueue
from headway.policy.iteration.sequence import WHOLE, SequenceState

MISFITS = 32
"""How many waiting requests one decision tries to find KV for in vain: a bound on its time."""


class PrefillCandidates:
    """Of one group. `shut_for`: a long request of another group that has waited too long for KV here.

    A request whose KV does not fit is skipped, not waited for, until it has been skipped for `admission_age_s`: then
    nobody behind it enters before it does, but short ones within the headroom that it leaves them. After `MISFITS` of
    them nobody else enters in this iteration. Nobody enters either while KV from elsewhere has waited as long for room.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queue: WaitingQueue,
        admission: KvBlockAdmission,
        neighbours: NeighbourGroups | None,
    ) -> None:
        self.shut_for: SequenceState | None = None
        self._config = config
        self._queue = queue
        self._admission = admission
        self._neighbours = neighbours

    def at(self, now: float, iterations: int, advanced: int) -> Iterator[PackCandidate]:
        """In order. To be consumed lazily, requests being admitted as they come; `advanced`: the iteration, of so many,
        in which any prefill got tokens last."""
        config, admission = self._config, self._admission
        one_at_a_time = config.pipeline_schedule == "microbatch"
        begun, misfits, closed = self._queue.begun, 0, len(admission.holders) >= config.max_num_seqs
        closed = closed or admission.custody.shut(now, config.admission_age_s)
        spare = admission.spare_blocks(self.shut_for) if self.shut_for is not None else None
        for sequence in self._queue.ordered(now):
            if sequence.lease is not None:
                begun -= 1
                if one_at_a_time and sequence.in_flight:
                    continue
            else:
                if closed:
                    if not begun:
                        return
                    continue
                if spare is not None and (sequence.is_long or admission.blocks(sequence) > spare):
                    misfits += 1
                    closed = misfits >= MISFITS
                    continue
                if not admission.fits(sequence):
                    misfits += 1
                    if self._skip(sequence, now):
                        spare = admission.spare_blocks(sequence)
                    closed = misfits >= MISFITS or spare == 0
                    continue
                if spare is not None:
                    spare -= admission.blocks(sequence)
            stalled = iterations - (advanced if sequence.lease is None else sequence.last_progress)
            candidate = self._candidate(sequence, now, stalled)
            if candidate.remaining > 0:  # else its shard is full, and no group has taken over
                yield candidate
            closed = closed or len(admission.holders) >= config.max_num_seqs

    def _candidate(self, sequence: SequenceState, now: float, stalled: int) -> PackCandidate:
        slack = (sequence.deadline_s - now - sequence.work_s) / max(sequence.total_s, 1e-9)
        remaining, past, completes, burden = sequence.remaining, sequence.scheduled, True, (0.0, 0.0)
        if sequence.limit != WHOLE:
            completes = remaining <= sequence.room
            remaining, past = min(remaining, sequence.room), sequence.past
            if sequence.shards and remaining > 0 and self._neighbours is not None:
                burden = self._neighbours.burden(sequence)
        return PackCandidate(sequence.request.id, past, remaining, sequence.is_long, slack, stalled, completes, *burden)

    def _skip(self, sequence: SequenceState, now: float) -> bool:
        """Passed over for want of KV. True when that has gone on for too long."""
        if sequence.skipped_since is None:
            sequence.skipped_since = now
        return now - sequence.skipped_since >= self._config.admission_age_s
