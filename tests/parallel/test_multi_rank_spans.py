"""What an engine says to its ranks about a run, and what it makes of their words."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from headway.core.batch import KvOp
from headway.core.errors import InvariantError
from headway.core.executor import EmittedToken
from headway.core.sampling import SamplingParams
from headway.core.span import SpanTask
from headway.runtime.kv_transfer.peer import PeerLostError
from headway.runtime.sequence_parallel.multi_rank_span_executor import MultiRankSpanExecutor, SpanTaskError
from headway.runtime.sequence_parallel.span_messages import (
    AdmitSpan,
    BeginSpan,
    ContinueSpan,
    FinishSpan,
    GrantSlots,
    HoldSpan,
    LayerEdge,
    RunFromRank,
    SpanBegun,
    SpanBroken,
    SpanComputed,
    SpanEnded,
    SpanHalted,
    StartSpan,
    SuspendRequest,
    WantSlots,
    to_rank,
)

Answers = dict[type, list[list[RunFromRank]]]


class Ranks:
    """An executor of two ranks that answer by a script: to each kind of word, what each says, in turn."""

    layout = SimpleNamespace(accelerators=2)

    def __init__(self, answers: Answers) -> None:
        self.told: list[object] = []
        self.replayed: list[tuple[KvOp, ...]] = []
        self._answers, self._mail = answers, list[tuple[int, RunFromRank]]()
        self.runs = MultiRankSpanExecutor(self, lambda: (KvOp("reassign", "r", 0, before="r/spans"),))  # type: ignore[arg-type]

    def send_control(self, body: bytes) -> None:
        word = to_rank.decode(body)
        self.told.append(word)
        if answers := self._answers.get(type(word)):
            self._mail += enumerate(answers.pop(0))

    def number(self, request_id: str) -> int | None:
        return None

    def replay(self, ops: tuple[KvOp, ...]) -> None:
        self.told.append(ops)

    def poll(self, timeout_s: float) -> None:
        if self._mail:
            self.runs.on_message(*self._mail.pop(0))

    def begin(self, room: Callable[[int, bool], list[tuple[int, int]]] = lambda *_: [(0, 64)]) -> None:
        self.runs.admit("r", memoryview(b"\1\0\0\0"), SamplingParams(max_tokens=1), ())
        self.runs.begin("r", SpanTask(0, 50, (0,)), (), True, (), room, lambda: None)


def both(word: RunFromRank) -> list[RunFromRank]:
    return [word, word]


READY: Answers = {BeginSpan: [both(WantSlots("r", 50, False))], GrantSlots: [both(SpanBegun("r"))]}


def kinds(told: list[object]) -> list[type]:
    return [type(word) for word in told]


def test_a_reservation_follows_the_block_operations_that_made_it() -> None:
    ranks = Ranks(READY | {GrantSlots: [both(WantSlots("r", 20, True)), both(SpanBegun("r"))]})
    asked: list[tuple[int, bool]] = []

    def room(tokens: int, anew: bool) -> list[tuple[int, int]]:
        asked.append((tokens, anew))
        return [(8, 56)]

    ranks.begin(room)
    assert asked == [(50, False), (20, True)]
    assert kinds(ranks.told) == [AdmitSpan, BeginSpan, tuple, GrantSlots, tuple, GrantSlots]
    assert ranks.told[-1] == GrantSlots("r", ((8, 56),))


def test_a_pause_is_reported_once_with_the_bytes_of_all_ranks() -> None:
    halted = SpanHalted("r", 16, 1, 100, 10, 200)
    ranks = Ranks(
        READY | {BeginSpan: [both(SpanBegun("r"))], StartSpan: [[], both(SpanComputed("r"))], HoldSpan: [both(halted)]}
    )
    ranks.begin()
    answers = iter([False, True, True, True])
    assert not ranks.runs.go("r", lambda: next(answers), lambda layers: None)
    assert [word for word in ranks.told if isinstance(word, HoldSpan | StartSpan)] == [
        StartSpan("r", False, False),
        HoldSpan("r"),
    ]
    tokens, layer, saved = ranks.runs.saved("r")
    assert (tokens, layer) == (16, 1)
    assert (saved.kv_bytes, saved.activation_bytes, saved.kv_bytes_at_end) == (200, 20, 400)
    assert ranks.runs.go("r", lambda: True, lambda layers: None)
    assert ranks.told[-1] == StartSpan("r", True, False)


def test_the_scheduler_runs_after_each_layer_edge() -> None:
    answers: Answers = {
        BeginSpan: [both(SpanBegun("r"))],
        StartSpan: [both(LayerEdge("r", 1))],
        ContinueSpan: [both(LayerEdge("r", 2)), both(SpanComputed("r"))],
    }
    ranks = Ranks(answers)
    ranks.begin()
    layers: list[int] = []
    assert ranks.runs.go("r", None, layers.append, True)
    assert layers == [1, 2]


def test_kv_taken_over_by_the_request_is_reported_before_its_decode() -> None:
    first = EmittedToken("r", 7, None)
    ended: list[RunFromRank] = [SpanEnded("r", first, False, 50), SpanEnded("r", None, False, 50)]
    ranks = Ranks(READY | {BeginSpan: [both(SpanBegun("r"))], FinishSpan: [ended]})
    ranks.begin()
    assert ranks.runs.finish("r", True) == (first, False)
    assert ranks.runs.whole("r", 50)
    assert not ranks.runs.whole("r", 51)
    ranks.runs.forget("r")
    assert kinds(ranks.told)[-2:] == [tuple, SuspendRequest]
    ranks.runs.forget("r")
    assert kinds(ranks.told).count(SuspendRequest) == 1
    assert "r" not in ranks.runs


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(("end", "error"), [(None, SpanTaskError), (1, PeerLostError)])
def test_one_failing_rank_ends_the_span(order: int, end: int | None, error: type[Exception]) -> None:
    words: list[RunFromRank] = [SpanComputed("r"), SpanBroken("r", "a peer is gone", end)]
    ranks = Ranks(READY | {BeginSpan: [both(SpanBegun("r"))], StartSpan: [words[:: 1 - 2 * order]]})
    ranks.begin()
    with pytest.raises(error, match="a peer is gone"):
        ranks.runs.go("r", None, lambda layers: None)


def test_differing_reports_of_ranks_are_an_internal_error() -> None:
    ranks = Ranks(READY | {BeginSpan: [[SpanBegun("r"), WantSlots("r", 5, False)]]})
    with pytest.raises(InvariantError, match="differ"):
        ranks.begin()
