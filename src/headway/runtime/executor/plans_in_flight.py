"""The engine's record of sent plans: the stream of each group, and for each plan the ranks still computing it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from headway.core.batch import GroupBatch
from headway.core.errors import InvariantError
from headway.core.executor import EmittedToken
from headway.core.sampling import SamplingParams
from headway.perf.latency.layout import ParallelLayout
from headway.runtime.executor.messages import BatchPlan, PlanDone
from headway.runtime.executor.plan_stream import ForeignTokens, PlanWriter
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

    def __init__(self, index: int, ranks: tuple[RankPosition, ...], numbers: Mapping[str, int]) -> None:
        self.index = index
        self.ranks = ranks
        self.writer = PlanWriter(numbers)
        self.in_flight: deque[PlanInFlight] = deque()
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
        before = flight.stage_spans[place.stage]
        span = (done.start_s + ahead_s, done.end_s + ahead_s)
        # A stage lasts from the first begin to the last end of its tensor-parallel ranks.
        flight.stage_spans[place.stage] = span if before is None else (min(before[0], span[0]), max(before[1], span[1]))
        if place.draws:
            flight.result = done

    def commit(self, flight: PlanInFlight, requests: Mapping[str, TrackedRequest]) -> list[EmittedToken]:
        """Take in the tokens of the oldest plan, which all ranks have carried out, and return them."""
        assert self.in_flight.popleft() is flight
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


def make_groups(layout: ParallelLayout, numbers: Mapping[str, int]) -> list[GroupStream]:
    """Empty streams of all KV groups of a layout."""
    ranks = places(layout)
    return [
        GroupStream(group, tuple(place for place in ranks if place.group == group), numbers)
        for group in range(layout.kvp)
    ]
