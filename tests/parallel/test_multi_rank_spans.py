"""What an engine says to its ranks about a run, and what it makes of their words."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from headway.core.batch import EmittedToken, KvOp
from headway.core.errors import InvariantError
from headway.core.request import SamplingParams, SpanTask
from headway.runtime.engine.protocol import (
    AbortRequest,
    ComputeSpan,
    PauseRequest,
    PeerLostError,
    ResumeSpan,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
    SubmitRequest,
)
from headway.runtime.executor.plans import SpanFromRank, SpanToRank
from headway.runtime.kv_transfer.multi_rank import MultiRankSpanExecutor, SpanTaskError

Answers = dict[type, list[list[SpanFromRank]]]


class Ranks:
    """An executor of two ranks that answer by a script: to each kind of word, what each says, in turn."""

    layout = SimpleNamespace(accelerators=2)

    def __init__(self, answers: Answers) -> None:
        self.told: list[object] = []
        self.replayed: list[tuple[KvOp, ...]] = []
        self._answers, self._mail = answers, list[tuple[int, SpanFromRank]]()
        self.runs = MultiRankSpanExecutor(self, lambda: (KvOp("reassign", "r", 0, before="r/spans"),))  # type: ignore[arg-type]

    def send_control(self, message: SpanToRank, *frames: object) -> None:
        self.told.append(message)
        if answers := self._answers.get(type(message)):
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
        run = SpanTask(0, 50, (0,))
        self.runs.begin(ComputeSpan(id="r", index=3, run=run, last=True, preemptible=True), room, lambda: None)


def both(word: SpanFromRank) -> list[SpanFromRank]:
    return [word, word]


ENDED = SpanTaskDone(id="r", index=3, emitted=None, whole=50)


def kinds(told: list[object]) -> list[type]:
    return [type(word) for word in told]


def test_a_reservation_follows_the_block_operations_that_made_it() -> None:
    answers: Answers = {
        ComputeSpan: [both(SpanTaskPaused(id="r", index=3, waits=True, slots=50))],
        ResumeSpan: [both(SpanTaskPaused(id="r", index=3, waits=True, slots=20, replace=True)), both(ENDED)],
    }
    ranks = Ranks(answers)
    asked: list[tuple[int, bool]] = []

    def room(tokens: int, anew: bool) -> list[tuple[int, int]]:
        asked.append((tokens, anew))
        return [(8, 56)]

    ranks.begin(room)
    assert ranks.runs.go("r", None, lambda layers: None)
    assert asked == [(50, False), (20, True)]
    assert kinds(ranks.told) == [SubmitRequest, ComputeSpan, tuple, ResumeSpan, tuple, ResumeSpan]
    assert ranks.told[-1] == ResumeSpan("r", ((8, 56),))


def test_a_pause_is_reported_once_with_the_bytes_of_all_ranks() -> None:
    halted = SpanTaskPaused(id="r", index=3, tokens=16, layer=1, kv_bytes=100, activation_bytes=10, kv_bytes_at_end=200)
    ranks = Ranks({ComputeSpan: [[]], PauseRequest: [both(halted), both(ENDED)]})
    ranks.begin()
    answers = iter([False, True])
    assert not ranks.runs.go("r", lambda: next(answers), lambda layers: None)
    assert kinds(ranks.told) == [SubmitRequest, ComputeSpan, PauseRequest]
    tokens, layer, saved = ranks.runs.saved("r")
    assert (tokens, layer) == (16, 1)
    assert (saved.kv_bytes, saved.activation_bytes, saved.kv_bytes_at_end) == (200, 20, 400)
    # Continued, and at once to be paused again.
    assert ranks.runs.go("r", lambda: True, lambda layers: None)
    assert ranks.told[-2:] == [ResumeSpan("r"), PauseRequest("r")]


def test_the_scheduler_runs_after_each_layer_edge() -> None:
    """And only there: not where ranks ask for slots, even for none."""
    edges = [both(SpanTaskPaused(id="r", index=3, waits=True, layer=layer)) for layer in (1, 2)]
    answers: Answers = {
        ComputeSpan: [both(SpanTaskPaused(id="r", index=3, waits=True))],
        ResumeSpan: [*edges, both(ENDED)],
    }
    ranks, asked = Ranks(answers), list[int]()
    ranks.begin(lambda tokens, anew: [asked.append(tokens)][:0])
    layers: list[int] = []
    assert ranks.runs.go("r", None, layers.append)
    assert layers == [1, 2]
    assert asked == [0]


def test_kv_taken_over_by_the_request_is_reported_before_its_decode() -> None:
    first = EmittedToken("r", 7, None)
    ended: list[SpanFromRank] = [
        SpanTaskDone(id="r", index=3, emitted=first, whole=50),
        SpanTaskDone(id="r", index=3, emitted=None, whole=50),
    ]
    ranks = Ranks({ComputeSpan: [ended]})
    ranks.begin()
    assert ranks.runs.go("r", None, lambda layers: None)
    assert ranks.runs.finish("r") == (first, False)
    assert ranks.runs.whole("r", 50)
    assert not ranks.runs.whole("r", 51)
    ranks.runs.forget("r")
    assert kinds(ranks.told)[-2:] == [tuple, AbortRequest]
    ranks.runs.forget("r")
    assert kinds(ranks.told).count(AbortRequest) == 1
    assert "r" not in ranks.runs


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(("by", "error"), [(None, SpanTaskError), (1, PeerLostError)])
def test_one_failing_rank_ends_the_span(order: int, by: int | None, error: type[Exception]) -> None:
    words: list[SpanFromRank] = [ENDED, SpanTaskLost("r", "a peer is gone", by)]
    ranks = Ranks({ComputeSpan: [words[:: 1 - 2 * order]]})
    ranks.begin()
    with pytest.raises(error, match="a peer is gone"):
        ranks.runs.go("r", None, lambda layers: None)


def test_differing_reports_of_ranks_are_an_internal_error() -> None:
    ranks = Ranks({ComputeSpan: [[ENDED, SpanTaskPaused(id="r", index=3, waits=True, slots=5)]]})
    ranks.begin()
    with pytest.raises(InvariantError, match="differ"):
        ranks.runs.go("r", None, lambda layers: None)
