"""The engine's record of sent plans: the stream of each group, and for each plan the ranks still computing it.

`GroupStream` keeps two states of its group: the writer's, after the newest plan, and the committed one, after the last
plan that all ranks have carried out. A rank that lost its place starts over from the committed one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from headway.core.batch import GroupBatch
from headway.core.errors import InvariantError
from headway.core.executor import EmittedToken
from headway.core.sampling import SamplingParams
from headway.kv.block_allocator import BlockTables
from headway.perf.latency.layout import ParallelLayout
from headway.runtime.executor.messages import BatchPlan, GroupSnapshot, PlanDone
from headway.runtime.executor.plan_stream import ForeignTokens, PlanWriter, StreamState, replay
from headway.runtime.executor.rank_layout import RankPosition, places


class TrackedRequest:
    """A live request's data at the engine, for ranks that start over."""

    __slots__ = ("known_outputs", "number", "output", "params", "prompt")

    def __init__(self, number: int, prompt: bytes, params: SamplingParams, groups: int) -> None:
        self.number = number
        self.prompt = prompt
        self.params = params
        self.output: list[int] = []
        self.known_outputs = [0] * groups
        """For each KV group: how many output tokens it holds as of its last committed plan."""

    @property
    def prompt_tokens(self) -> int:
        """A token id has 4 bytes."""
        return len(self.prompt) // 4


class PlanInFlight:
    """A plan that not all ranks of its group have carried out."""

    __slots__ = ("batch_id", "foreign_tokens", "names", "part", "pending_ranks", "plan", "result", "stage_spans")

    def __init__(
        self, batch_id: int, part: GroupBatch, plan: BatchPlan, foreign: ForeignTokens, ranks: set[int], stages: int
    ) -> None:
        self.batch_id = batch_id
        self.part = part
        self.plan = plan
        self.foreign_tokens = foreign
        self.pending_ranks = ranks
        self.names = [*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)]
        """The requests that get a token, in the order of the tokens in `result`."""
        self.stage_spans: list[tuple[float, float] | None] = [None] * stages
        """For each pipeline stage: first begin and last end among its ranks, in seconds of our clock."""
        self.result: PlanDone | None = None
        """The report of the rank that samples."""

    def emitted(self) -> list[EmittedToken]:
        """The tokens that were drawn. The plan has been carried out."""
        assert self.result is not None
        logprobs = self.result.logprobs or (None,) * len(self.names)
        return [EmittedToken(*each) for each in zip(self.names, self.result.tokens, logprobs, strict=True)]


class GroupStream:
    """One group's plan stream. Groups that share no request advance independently."""

    def __init__(self, index: int, ranks: tuple[RankPosition, ...], kv_blocks: int, numbers: Mapping[str, int]) -> None:
        self.index = index
        self.ranks = ranks
        self.writer = PlanWriter(kv_blocks, numbers)
        self.committed = StreamState(BlockTables(kv_blocks))
        self.committed_seq = 0
        self.shard_starts: dict[str, int] = {}
        """Of requests whose first tokens lie in other groups: the first token held here."""
        self.in_flight: deque[PlanInFlight] = deque()
        self.resyncs: dict[int, int] = {}
        """For each rank: how often it asked for a snapshot since it last carried out a plan."""
        self.last_contact_s = 0.0
        """When a rank was last probed or sent a plan, or last sent a message."""
        self.last_progress_s = 0.0
        """When a rank last got a plan or sent anything."""

    def touch(self, now: float) -> None:
        """Record that a plan was sent, or that a rank sent a message."""
        self.last_contact_s = self.last_progress_s = now

    def record_done(self, place: RankPosition, done: PlanDone, ahead_s: float) -> None:
        """Take in a rank's report. ahead_s is added to its times. Raises InvariantError for a plan not in flight."""
        flight = next((flight for flight in self.in_flight if flight.plan.seq == done.seq), None)
        if flight is None or place.rank not in flight.pending_ranks:
            raise InvariantError(f"worker {place.rank} has carried out plan {done.seq}, which is not in flight")
        flight.pending_ranks.remove(place.rank)
        # Progress: only desyncs without a plan in between count towards the limit.
        self.resyncs.pop(place.rank, None)
        before = flight.stage_spans[place.stage]
        span = (done.start_s + ahead_s, done.end_s + ahead_s)
        # A stage lasts from the first begin to the last end of its tensor-parallel ranks.
        flight.stage_spans[place.stage] = span if before is None else (min(before[0], span[0]), max(before[1], span[1]))
        if place.draws:
            flight.result = done

    def commit(self, flight: PlanInFlight, requests: Mapping[str, TrackedRequest]) -> list[EmittedToken]:
        """Advance the committed state by the oldest plan, which all ranks have carried out. Returns its tokens."""
        assert self.in_flight.popleft() is flight
        plan = flight.plan
        self.committed.part_of(plan)
        self.committed.advance(replay(self.committed.tables, plan), flight.part.decodes.kv_sum)
        self.committed_seq = plan.seq
        for number, blocks, start in plan.ops:
            # Only the first operation of a shard carries its start; freeing its blocks ends the shard.
            if start:
                self.shard_starts[str(number)] = start
            elif not blocks:
                self.shard_starts.pop(str(number), None)
        for name, known, tokens in flight.foreign_tokens:
            if name in requests:
                outputs = requests[name].known_outputs
                # `known` and `tokens` count from the prompt's first token, known_outputs from the first output token.
                outputs[self.index] = max(outputs[self.index], known + len(tokens) - requests[name].prompt_tokens)
        emitted = flight.emitted()
        for one in emitted:
            if one.request in requests:
                requests[one.request].output.append(one.token)
                requests[one.request].known_outputs[self.index] += 1
        return emitted

    def snapshot(self, requests: Iterable[TrackedRequest]) -> GroupSnapshot:
        """Return the committed state, for a rank that starts over. Plans in flight must be sent again behind it."""
        state, tables = self.committed, self.committed.tables
        known = {str(r.number): r.prompt_tokens + r.known_outputs[self.index] for r in requests}
        # A request may have ended and still hold blocks, or be live and hold none here.
        names = dict.fromkeys((*known, *tables.owners()))
        owners = set(tables.owners())
        return GroupSnapshot(
            seq=self.committed_seq,
            plans_checksum=state.plans_checksum,
            state_checksum=state.state_checksum,
            requests=tuple(
                (int(n), known.get(n, 0), tables.runs(n) if n in owners else (), self.shard_starts.get(n, 0))
                for n in names
            ),
            groups=tuple((epoch, tuple(map(int, members))) for epoch, members in state.epochs.items()),
        )

    def unknown_tokens(self, part: GroupBatch, requests: Mapping[str, TrackedRequest]) -> ForeignTokens:
        """Tokens generated in other groups of the requests that this group begins to hold with `part`.

        None of their batches are in flight in this group, so all that has come back is all that there is.
        """
        unknown = []
        for op in part.kv_ops:
            request = requests.get(op.request)
            if op.verb == "reserve" and request is not None:
                known = request.known_outputs[self.index]
                if known < len(request.output):
                    unknown.append((op.request, request.prompt_tokens + known, tuple(request.output[known:])))
        return tuple(unknown)


def make_groups(layout: ParallelLayout, kv_blocks: int, numbers: Mapping[str, int]) -> list[GroupStream]:
    """Empty streams of all KV groups of a layout."""
    ranks = places(layout)
    return [
        GroupStream(group, tuple(place for place in ranks if place.group == group), kv_blocks, numbers)
        for group in range(layout.kvp)
    ]
