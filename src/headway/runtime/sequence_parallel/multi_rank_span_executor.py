"""The engine's end of runs where the instance is several processes: each rank computes its part, this leads them. No
torch.

`member.Computes` over the ranks of an executor. Each call tells all ranks and returns when all have answered; what the
loop has to do meanwhile is done in between. Ranks give the same answers in the same order, as their parts of a run have
the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from headway.core.batch import KvOp
from headway.core.errors import HeadwayError, InvariantError
from headway.core.executor import Emitted
from headway.core.sampling import SamplingParams
from headway.core.span import Run
from headway.runtime.executor.multi_process import ParallelExecutor
from headway.runtime.kv_transfer.peer import PeerLostError
from headway.runtime.kv_transfer.rank_notes import NOBODY
from headway.runtime.sequence_parallel.span_messages import (
    Begin,
    Begun,
    Broken,
    Cease,
    Edge,
    Ended,
    Finish,
    Given,
    Go,
    Halted,
    Hold,
    Keep,
    On,
    RunFromRank,
    RunToRank,
    Through,
    Want,
    encode,
)

Slots = Sequence[tuple[int, int]]
W = TypeVar("W", bound=RunFromRank)

_WAIT_S = 0.005
"""Between two looks at the loop while ranks compute."""


class RunError(HeadwayError):
    """A run cannot be completed: a rank has said so."""


class RunRanks:
    """See `runtime.sequence_parallel.span_executor.Runs` for what its methods promise. untold: KV operations that no
    batch has carried yet, which
    ranks must follow before they write where these have made room."""

    def __init__(self, executor: ParallelExecutor, untold: Callable[[], tuple[KvOp, ...]]) -> None:
        self._executor, self._untold = executor, untold
        self._ranks = executor.layout.accelerators
        self._known: set[str] = set()
        self._whole: dict[str, int] = {}
        self._saved: dict[str, Halted] = {}
        self._looks: dict[str, Callable[[], None]] = {}
        self._name = ""
        self._said: dict[int, RunFromRank] = {}

    def hear(self, rank: int, said: RunFromRank) -> None:
        """A rank's word. What it says of a request that was forgotten is ignored."""
        if said.name == self._name and (rank not in self._said or isinstance(said, Broken)):
            self._said[rank] = said

    def admit(self, name: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...]) -> None:
        """See `Runs.admit`."""
        self._known.add(name)
        self._tell(Keep(name, bytes(prompt), params, output))

    def begin(
        self,
        name: str,
        run: Run,
        before: Sequence[Run],
        preemptible: bool,
        drawn: tuple[int, ...],
        room: Callable[[int, bool], Slots],
        look: Callable[[], None],
    ) -> None:
        """See `Runs.begin`."""
        self._looks[name] = look
        self._whole.pop(name, None)
        words = self._ask(Begin(name, run, tuple(before), preemptible, drawn))
        while isinstance(words[0], Want):
            wants = _all(words, Want)
            slots = room(max(one.tokens for one in wants), wants[0].anew)
            self._executor.replay(self._untold())
            words = self._ask(Given(name, tuple(slots)))
        _all(words, Begun)

    def go(
        self, name: str, pause: Callable[[], bool] | None, behind: Callable[[int], None], beside: bool = False
    ) -> bool:
        """See `Runs.go`. `behind` is called only where plans are to be carried out there (beside): ranks see by
        themselves what may go."""
        wanted = pause or _never
        held = wanted()

        def asked() -> None:
            nonlocal held
            if not held and wanted():
                held = True
                self._tell(Hold(name))

        words = self._ask(Go(name, held, beside), asked)
        while isinstance(words[0], Edge):
            behind(_all(words, Edge)[0].layers)
            words = self._ask(On(name), asked)
        if isinstance(words[0], Through):
            _all(words, Through)
            return True
        stopped = _all(words, Halted)
        self._saved[name] = Halted(
            name,
            stopped[0].tokens,
            stopped[0].layer,
            sum(one.kv_bytes for one in stopped),
            sum(one.activation_bytes for one in stopped),
            sum(one.kv_bytes_at_end for one in stopped),
        )
        return False

    def finish(self, name: str, draw: bool) -> tuple[Emitted | None, bool]:
        """See `Runs.finish`."""
        ended = _all(self._ask(Finish(name, draw)), Ended)
        self._whole[name] = min(one.whole for one in ended)
        return ended[0].emitted, any(one.moved for one in ended)

    def saved(self, name: str) -> tuple[int, int, Halted]:
        """See `Runs.saved`."""
        halted = self._saved.pop(name)
        return halted.tokens, halted.layer, halted

    def whole(self, name: str, tokens: int) -> bool:
        """See `Runs.whole`."""
        return self._whole.get(name) == tokens

    def check(self, name: str) -> None:
        """Ranks do, and say so."""

    def forget(self, name: str) -> None:
        """See `Runs.forget`."""
        if name not in self._known:
            return
        if self._whole.pop(name, None):  # it may have become the request's own, under the number that its blocks have
            self._executor.replay(self._untold())
        self._known.discard(name)
        self._saved.pop(name, None)
        self._looks.pop(name, None)
        self._tell(Cease(name, self._executor.number(name) or NOBODY))

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def _ask(self, word: RunToRank, meanwhile: Callable[[], None] = lambda: None) -> list[RunFromRank]:
        """Every rank's answer. Raises RunError, or PeerLostError, where one cannot go on, what the loop raises, and
        LostError."""
        self._name, self._said = word.name, {}
        look = self._looks[word.name]
        self._tell(word)
        while True:
            for said in self._said.values():
                if isinstance(said, Broken):
                    raise RunError(said.why) if said.end is None else PeerLostError(said.why, said.end)
            if len(self._said) == self._ranks:
                return [self._said[rank] for rank in range(self._ranks)]
            self._executor.attend(_WAIT_S)
            meanwhile()
            look()

    def _tell(self, word: RunToRank) -> None:
        self._executor.aside(encode(word))


def _all(words: Sequence[RunFromRank], kind: type[W]) -> list[W]:
    """All ranks have answered alike."""
    alike: list[W] = [word for word in words if isinstance(word, kind)]
    if len(alike) < len(words):
        raise InvariantError(f"ranks of one instance differ in a run: {words}")
    return alike


def _never() -> bool:
    return False
