"""Decodes in place: a group continues, token by token, over the KV that its instances hold together (LoongServe §4.2).

Each token is a span task of its own, which the controller begins when the whole group has reported the end of the one
before: a round trip per token, which the paper's instances, with one common scheduler, do not have. A group changes
between two tokens. It grows without moving KV: a joining instance holds nothing, becomes the master, and gets the KV of
the tokens decoded from then on. It shrinks with a token: while that token's layers are computed, KV of the leaving
instances moves to the remaining ones, evenly. (The paper scales down during the prefill, which needs no movement, and
never scales down a decode.)

A prompt that was computed with Ulysses leaves KV cut by heads. Its group decodes in that form: each instance gets its
heads of every token, and nothing moves. Once the group changes, or one of its instances is full, the KV is laid out by
tokens with the next token (a ring, as above), as soon as the keepers have room for that beside what they have.
"""

from __future__ import annotations

import msgspec

from headway.core.request import SpanTask, Strategy
from headway.policy.placement.contract import GROUP_SLACK
from headway.runtime.cluster.requests import InstanceRegistry, RequestAttempt
from headway.runtime.engine.protocol import ComputeSpan, SpanTaskDone

_WHAT = "layout"


class GroupDecodeSteps:
    """The decode steps of groups."""

    def __init__(self, registry: InstanceRegistry) -> None:
        self._registry = registry
        # How often so far a decoding group has got, and has lost, instances.
        self.grown = self.shrunk = 0

    def begin(self, attempt: RequestAttempt) -> None:
        """Let a group decode a request, over the KV that its span tasks have left. The caller calls `next` after it."""
        # Step numbers follow those of the spans, and grow also over a stay in a scheduler: late messages do not match.
        attempt.step = attempt.count = max(attempt.count, len(attempt.runs))
        attempt.steps = [*attempt.prefix, *attempt.runs]

    def take_up(self, attempt: RequestAttempt, home: int) -> None:
        """Let a group decode a request, over the KV that a scheduler has left on `home`. The caller calls `next`."""
        attempt.step = attempt.count = max(attempt.count, len(attempt.runs))
        # One made-up task on `home` alone describes where all of the KV lies, however it was computed.
        attempt.steps = [SpanTask(0, attempt.kv_tokens, (home,))]
        attempt.spread, attempt.whole, attempt.home = (home,), set(), home

    def end(self, attempt: RequestAttempt) -> None:
        """End the decode in place: the KV is on one instance, whose scheduler continues it."""
        attempt.step = attempt.home = attempt.token = None
        attempt.steps.clear()

    def next(self, attempt: RequestAttempt, group: tuple[int, ...]) -> None:
        """Begin the next token on `group`, which then holds all KV, as soon as each instance has room for its share.

        Until then the present holders compute with it.
        """
        assert attempt.step is not None
        asked, held = attempt.asked, set(attempt.spread)
        known = asked.submit.prompt_tokens + len(asked.told)
        run = attempt.token = self._run(attempt, group, known)
        order = run.group
        # An instance that joins knows neither the tokens decoded so far nor the layout of the KV before.
        begins = attempt.home is not None or bool(set(order) - held)
        self._registry.admit(attempt, order)
        for number in self._anew(attempt, run):
            self._registry.kv.make(number, attempt.request.id, _WHAT, self._share(attempt, run.keepers or order))
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
        self._registry.tell(order, message)

    def done(self, number: int, attempt: RequestAttempt, message: SpanTaskDone) -> bool:
        """Handle one instance's part of a token; True when all of the group have reported."""
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
        self._registry.kv.forget(attempt.request.id, _WHAT)
        attempt.step = attempt.count = attempt.step + 1
        attempt.home = None
        # Tokens that differ in their number only are merged into one task: `before` must not grow with the output.
        last = attempt.steps[-1]
        if last.in_place and not run.keepers and msgspec.structs.replace(last, start=run.start, end=run.end) == run:
            attempt.steps[-1] = msgspec.structs.replace(last, end=run.end)
        else:
            attempt.steps.append(run)
        kept = set(run.keepers or run.group)
        attempt.spread = tuple(sorted(kept))
        self.grown += bool(kept - held)
        self.shrunk += bool(held - kept)
        # For now, not for good: the group may grow to those instances again.
        if held - kept:
            self._registry.leave(attempt, but=kept)

    def _run(self, attempt: RequestAttempt, group: tuple[int, ...], known: int) -> SpanTask:
        """Return the span task of token `known - 1`, in the layout that the KV has or gets with it."""
        last, held = attempt.steps[-1], set(attempt.spread)
        everybody = tuple(sorted(held.union(group)))
        # Holders that are to leave take part in this token; `keepers` (none: all) have the KV after it.
        keepers = tuple(sorted(group)) if held.difference(group) and self._fits(attempt, group) else ()
        if last.strategy.attn == "ulysses" and not keepers:
            full = {number for number in held if self._registry.kv.free(number) <= GROUP_SLACK}
            others = tuple(number for number in everybody if number not in full)
            # By heads every instance grows with every token: one full instance stops all, so it has to leave.
            if full and others and self._fits(attempt, others):
                keepers = others
            # Unchanged group, or no room yet for the layout by tokens: go on by heads, on the present holders.
            elif held.issuperset(group) or not self._fits(attempt, everybody):
                return SpanTask(known - 1, known, last.group, last.strategy, last.node, True)
        # The first of the order is the master: it computes the token and keeps its KV.
        master = self._master(attempt, keepers or group)
        order = (master, *(number for number in everybody if number != master))
        return SpanTask(known - 1, known, order, Strategy("ring"), None, True, keepers=keepers)

    def _fits(self, attempt: RequestAttempt, group: tuple[int, ...]) -> bool:
        """Whether a group has free tokens for an even layout of all KV, beside what its instances hold already."""
        return all(self._registry.kv.room(number) >= self._share(attempt, group) for number in group)

    def _share(self, attempt: RequestAttempt, group: tuple[int, ...]) -> int:
        """Return the tokens that each instance needs for an even layout."""
        return attempt.kv_tokens // len(group) + GROUP_SLACK

    def _anew(self, attempt: RequestAttempt, run: SpanTask) -> tuple[int, ...]:
        """Return the instances that get more KV with a task than its token's: keepers, or all at a change of layout."""
        if run.keepers:
            return run.keepers
        return run.group if attempt.steps[-1].strategy.attn == "ulysses" != run.strategy.attn else ()

    def _master(self, attempt: RequestAttempt, group: tuple[int, ...]) -> int:
        """Return the instance that computes the token and gets its KV.

        The master of the last token while the group is the same and it has free tokens; else a joining instance that
        has some; else the instance with the most free tokens.
        """
        before, run = set(attempt.spread), attempt.token
        if (
            run is not None
            and before == set(group)
            and run.group[0] in before
            and self._registry.kv.free(run.group[0]) > GROUP_SLACK
        ):
            return run.group[0]
        fresh = [number for number in group if number not in before and self._registry.kv.free(number) > GROUP_SLACK]
        return self._registry.kv.roomiest(fresh or group)
