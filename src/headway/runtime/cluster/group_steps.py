"""Decodes in place: a group continues, token by token, over the KV that its instances hold together (LoongServe §4.2).

Each token is a run of its own, which the router begins when the group has told the end of the one before: a round trip
a token, which the paper, whose instances have a scheduler in common, has not. A group changes between two tokens. It
grows without moving anything: who joins holds nothing, and gets the KV of what is decoded from then on, being the
master. It shrinks with a token: while the layers of that are computed, KV of those that leave is brought to those that
stay, evenly. (The paper scales down while a prompt is computed, and so needs no movement; a decode it never does.)

A prompt that was computed with Ulysses leaves KV that is cut by heads. Its group decodes so too: each gets its heads of
every token, and nothing moves. Once its group changes, or one of it is full, KV is laid out by tokens with the next
token (a ring, as above), as soon as those who are to have it have room for that beside what they have.
"""

from __future__ import annotations

import msgspec

from headway.core.span import Strategy
from headway.runtime.cluster.attempt import RequestAttempt
from headway.runtime.cluster.instance_registry import InstanceRegistry
from headway.runtime.cluster.messages import ComputeSpan, SpanTask, SpanTaskDone

_LOW = 64
"""KV tokens that are to be free: with less room the master is followed by the roomiest of the group."""

_WHAT = "layout"


class GroupDecodeSteps:
    """The decode steps of groups. grown, shrunk: how often a group has changed while it decoded."""

    def __init__(self, fleet: InstanceRegistry) -> None:
        self._fleet = fleet
        self.grown = self.shrunk = 0

    def begin(self, attempt: RequestAttempt) -> None:
        """From now on its group decodes it, over the KV that its runs have left. `next` follows."""
        attempt.step = attempt.count = max(attempt.count, len(attempt.runs))
        attempt.steps = list(attempt.runs)

    def take_up(self, attempt: RequestAttempt, home: int) -> None:
        """From now on a group decodes it, over the KV that a scheduler has left on one instance. `next` follows."""
        attempt.step = attempt.count = max(attempt.count, len(attempt.runs))
        attempt.steps = [SpanTask(0, attempt.kv_tokens, (home,))]
        attempt.spread, attempt.whole, attempt.home = (home,), set(), home

    def end(self, attempt: RequestAttempt) -> None:
        """Its KV is on one instance, in whose scheduler it goes on."""
        attempt.step = attempt.home = attempt.token = None
        attempt.steps.clear()

    def next(self, attempt: RequestAttempt, group: tuple[int, ...]) -> None:
        """Compute a token; these instances have all KV with that, whoever has it before: as soon as each has room for
        its part of it."""
        assert attempt.step is not None
        asked, held = attempt.asked, set(attempt.spread)
        known = asked.submit.prompt_tokens + len(asked.told)
        run = attempt.token = self._run(attempt, group, known)
        order = run.group
        begins = attempt.home is not None or bool(set(order) - held)  # some know nothing of what was
        self._fleet.admit(attempt, order)
        for number in self._anew(attempt, run):
            self._fleet.promises.make(number, attempt.request.id, _WHAT, self._share(attempt, run.keepers or order))
        attempt.running = set(order)
        message = ComputeSpan(
            id=attempt.wire,
            index=attempt.step,
            run=run,
            drawn=tuple(asked.told[attempt.base :]) if begins else (asked.told[-1],),
            before=tuple(attempt.steps) if begins else (),
            last=True,
            home=attempt.home,
        )
        self._fleet.tell(order, message)

    def done(self, number: int, attempt: RequestAttempt, message: SpanTaskDone) -> bool:
        """An instance has done its part of a token; True when all have."""
        if message.index != attempt.step or number not in attempt.running:
            return False
        if message.delta is not None:
            attempt.asked.tell(message.delta)
            attempt.finished = message.delta.finish is not None
        attempt.running.discard(number)
        if attempt.running:
            return False
        self._computed(attempt)
        return True

    def _computed(self, attempt: RequestAttempt) -> None:
        run, held = attempt.token, set(attempt.spread)
        assert run is not None
        assert attempt.step is not None
        self._fleet.promises.forget(attempt.request.id, _WHAT)
        attempt.step = attempt.count = attempt.step + 1
        attempt.home = None
        last = attempt.steps[-1]
        if last.in_place and not run.keepers and msgspec.structs.replace(last, start=run.start, end=run.end) == run:
            attempt.steps[-1] = msgspec.structs.replace(last, end=run.end)
        else:
            attempt.steps.append(run)
        kept = set(run.keepers or run.group)
        attempt.spread = tuple(sorted(kept))
        self.grown += bool(kept - held)
        self.shrunk += bool(held - kept)
        if held - kept:
            self._fleet.leave(attempt, but=kept)

    def _run(self, attempt: RequestAttempt, group: tuple[int, ...], known: int) -> SpanTask:
        """The token's, in the form that KV has, or gets with it."""
        last, held = attempt.steps[-1], set(attempt.spread)
        everybody = tuple(sorted(held.union(group)))
        keepers = tuple(sorted(group)) if held.difference(group) and self._fits(attempt, group) else ()
        if last.strategy.attn == "ulysses" and not keepers:
            full = {number for number in held if self._fleet.free(number) <= _LOW}
            others = tuple(number for number in everybody if number not in full)
            if full and others and self._fits(attempt, others):
                keepers = others
            elif held.issuperset(group) or not self._fits(attempt, everybody):
                return SpanTask(known - 1, known, last.group, last.strategy, last.node, True)
        master = self._master(attempt, keepers or group)
        order = (master, *(number for number in everybody if number != master))
        return SpanTask(known - 1, known, order, Strategy("ring"), None, True, keepers=keepers)

    def _fits(self, attempt: RequestAttempt, group: tuple[int, ...]) -> bool:
        """Whether KV that is dealt to these evenly fits, whoever has how much of it before."""
        return all(self._fleet.room(number) >= self._share(attempt, group) for number in group)

    def _share(self, attempt: RequestAttempt, group: tuple[int, ...]) -> int:
        """Room that each needs for that."""
        return attempt.kv_tokens // len(group) + _LOW

    def _anew(self, attempt: RequestAttempt, run: SpanTask) -> tuple[int, ...]:
        """Who gets more KV with a run than its token's."""
        if run.keepers:
            return run.keepers
        return run.group if attempt.steps[-1].strategy.attn == "ulysses" != run.strategy.attn else ()

    def _master(self, attempt: RequestAttempt, group: tuple[int, ...]) -> int:
        """Who computes the token, and gets its KV: who did, while its group is the same and it has room; one that
        joins, where it has any; else the roomiest."""
        before, run = set(attempt.spread), attempt.token
        if (
            run is not None
            and before == set(group)
            and run.group[0] in before
            and self._fleet.free(run.group[0]) > _LOW
        ):
            return run.group[0]
        fresh = [number for number in group if number not in before and self._fleet.free(number) > _LOW]
        return self._fleet.roomiest(fresh or group)
