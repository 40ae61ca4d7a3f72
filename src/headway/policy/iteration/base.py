"""What drives a scheduler: the protocol of one instance, whether it is one group or several (KV parallelism).

An engine or a simulator calls `add` and `abort` as requests come and go, `schedule` whenever a first pipeline stage is
free, and `complete` when a batch has been carried out. Deterministic: the same calls with the same times give the same
batches. Implemented by `scheduler.Scheduler` (one group) and `groups.GroupedScheduler` (several).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from headway.core.batch import Batch, RequestProgress
from headway.core.events import RequestEvent
from headway.core.span import Phase, Span
from headway.kv.block_manager import BlockManager
from headway.kv.staged_kv import StagedKv
from headway.perf.latency.base import LatencyModel
from headway.policy.iteration.candidates import RemoteCost
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.sequence import SequenceState


class InstanceScheduler(Protocol):
    """add → schedule → complete. It decides; it never waits, reads a clock, or sees a token."""

    @property
    def config(self) -> SchedulerConfig: ...

    @property
    def latency(self) -> LatencyModel: ...

    @property
    def ledgers(self) -> Seq[BlockManager]:
        """One a group, in order of the groups."""

    @property
    def running(self) -> int:
        """Requests that hold KV."""

    @property
    def waiting(self) -> int:
        """Requests that hold none yet."""

    @property
    def idle(self) -> bool: ...

    def __contains__(self, request_id: str) -> bool: ...

    def deadline_s(self, request_id: str) -> float:
        """When the first token of a request that is here is due: its SLO's word, else the default's."""

    def progress(self, request_id: str) -> int:
        """Tokens of a request that is here whose KV is in place; of one that decodes, a lower bound."""

    @property
    def custody(self) -> StagedKv | None:
        """KV here that no sequence owns; None: this instance takes in none."""

    def add(self, span: Span, now: float, phase: Phase = "all") -> None:
        """Take on a request. Raises RequestError when it could never be served here.

        What custody holds under its id becomes its own: KV of its `cached_tokens` tokens is there, and room for all
        where more than the last is to be computed. phase "prefill": it ends with its first token (`staged`), and its KV
        goes into custody, unless that token is reported as its end. "decode": its KV must be in custody, that of all
        tokens but the last."""

    def schedule(self, now: float, ahead: int = 1, free: Container[int] | None = None) -> Batch | None:
        """The next batch, or None when there is nothing to do or too much in flight (`stages` batches a group).

        `ahead` above 1 allows a batch of decodes that stands for up to so many iterations (`Batch.repeat`). `free`: the
        groups whose first stage can begin at once; None: all. Call it until it gives None: groups that share no request
        have batches of their own."""

    def complete(
        self, batch_id: int, results: Seq[RequestProgress], now: float, elapsed_s: float | None = None, repeats: int = 1
    ) -> list[RequestEvent]:
        """A batch has been carried out. `results` names those that have ended; any other request that yielded output
        (a decode of the batch, a prompt whose last chunk was in it) has accepted one token and goes on, and may be
        named as such. `elapsed_s` teaches latency models that learn. `repeats` (at most the batch's `repeat`) is how
        many iterations of it were carried out. Returns what has become true since the last call, preemptions while
        scheduling included."""

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        """Drop a request: at once, or when the batch that it is in completes. Unknown ids (ended) are ignored."""

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """A request that decodes is to go on elsewhere: its KV goes into custody (`staged`), at once, or when the batch
        that it is in completes. Unknown ids (ended) are ignored, as is all of it where `custody` is None."""

    def lost(self, instance: int, now: float) -> list[RequestEvent]:
        """The instance has lost its KV, in all groups: everything in flight is void, all progress must be made again.

        The next batches' KV operations start from empty block tables. Returns what has become true, as `complete`."""

    def check(self) -> None:
        """Raise InvariantError unless cursors, sets and ledgers agree. Called when idle, and by tests each step."""


class NeighbourGroups(Protocol):
    """What the scheduler of one group asks about the others. A group that is alone has none."""

    def extend_shards(self, sequence: SequenceState, now: float) -> bool:
        """Let another group take over the rows of a decode whose shard here is full, or cannot grow. True: it did."""

    def remote_holders(self, group: int) -> Iterable[SequenceState]:
        """Requests that have a shard in `group` and their rows elsewhere."""

    def is_in_flight(self, sequence: SequenceState) -> bool:
        """Whether a request with a shard in this group is in a batch in flight."""

    def preempt(self, sequence: SequenceState, now: float) -> RequestEvent:
        """Take all KV of a request that is computed in another group."""

    def shards_freed(self) -> None:
        """A request has given its shards back: groups may be free of each other."""

    def remote_cost(self, request_id: str) -> RemoteCost:
        """What groups that hold earlier shards of a request add to its chunk, while a lockstep batch is made."""
