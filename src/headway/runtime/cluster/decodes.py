"""Decodes on native instances: residency in schedulers, and decodes in place, where a group continues, token by token,
over the KV that its instances hold together (LoongServe §4.2).

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

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headway.core.request import Phase, SpanTask, Strategy
from headway.policy.placement.contract import GROUP_SLACK
from headway.runtime.cluster.requests import InstanceRegistry, RequestAttempt
from headway.runtime.engine.protocol import ComputeSpan, PauseRequest, SpanTaskDone

if TYPE_CHECKING:
    from headway.runtime.cluster.native_backend import LiveKvMigrations

_LAYOUT = "layout"


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
            self._registry.kv.make(number, attempt.request.id, _LAYOUT, self._share(attempt, run.keepers or order))
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
        self._registry.kv.forget(attempt.request.id, _LAYOUT)
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


# Requests resident in schedulers, and decodes of groups: which instance takes a decode, with what KV, and where it
# continues.
#
# A decode on a group of several instances departs from the policies' papers: its KV is gathered on the group's instance
# with the most free tokens, whose scheduler batches it with other decodes. While that instance has too few, or with
# `group_decode: in-place`, the group decodes in place (`GroupDecodeSteps`).
#
# A pause or a new group takes effect after the token under way. A decode leaves a scheduler with its KV
# (`PauseRequest`, `OutputDelta.staged`); KV that a group holds is gathered, or stays with the instances that continue.


class LiveResidency:
    """Residency of requests on schedulers, and the decodes of groups, of one cluster."""

    def __init__(
        self,
        registry: InstanceRegistry,
        moves: LiveKvMigrations,
        steps: GroupDecodeSteps,
        in_place: bool,
        placed: Callable[[RequestAttempt, int], None],
        over: Callable[[RequestAttempt], None],
    ) -> None:
        """in_place: groups decode where their KV lies. placed: called when a prompt goes to an instance's scheduler.
        over: called with a request whose decode is enqueued after it has ended."""
        self._registry, self._moves = registry, moves
        self._steps, self._in_place = steps, in_place
        self._placed, self._over = placed, over
        self._left: list[RequestAttempt] = []
        self.halted = 0
        """Decodes so far that left a scheduler to continue elsewhere."""

    def enter(self, attempt: RequestAttempt, group: tuple[int, ...], phase: Phase) -> None:
        """Give a request to a group: its whole prompt, or its decode."""
        if phase != "decode":
            self.submit(attempt, self._registry.kv.roomiest(group), phase)
            return
        attempt.wanted = group
        if attempt.finished:
            self._over(attempt)
        # A transfer, a step or a pause is in progress; its completion handler re-reads `wanted`. A pause cannot be
        # cancelled.
        elif attempt.halts or attempt.gathers or attempt.running:
            attempt.stopping = attempt.halts
        elif attempt.at is not None:
            self._stay(attempt)
        # The group is decoding in place, and no instance of the new one has all of the KV.
        elif attempt.step is not None and not attempt.controlled.kv_at & set(group):
            self._go(attempt)
        else:
            self._decode(attempt, group)

    def submit(self, attempt: RequestAttempt, number: int, phase: Phase = "all") -> None:
        """Give a request to one instance's scheduler."""
        submit = attempt.asked.submit
        attempt.at = number
        # A decode has no prompt to compute, so it adds nothing to the load estimate.
        if phase != "decode":
            self._placed(attempt, number)
        # No timeout: the client's deadline is kept here, over all attempts.
        submit = msgspec.structs.replace(
            submit,
            id=attempt.wire,
            timeout_s=None,
            output=tuple(attempt.asked.told),
            phase=phase,
            priority=attempt.request.priority,
        )
        self._registry[number].submit(submit, attempt.asked.prompt)
        self._registry.kv.grown = True

    def leave(self, attempt: RequestAttempt) -> None:
        """Take a request off its scheduler or group, to continue elsewhere.

        A decode stops after the token under way, unless `enter` puts it back before the next `pump`; a prefill starts
        from the beginning.
        """
        if attempt.controlled.phase == "decode":
            attempt.wanted = ()
            attempt.stopping = attempt.at is not None or attempt.gathers or bool(attempt.running)
            self._left.append(attempt)
        elif attempt.at is not None:
            # Under a new id: what the old scheduler still sends for this request must not be taken for the new one's.
            self._registry.forget(attempt)
            self._moves.settled(attempt)
            attempt.at = None
            attempt.rename()

    def pump(self) -> None:
        """Halt the decodes that left and were not entered again. Called after all actions of a policy's call."""
        left, self._left = self._left, []
        for attempt in left:
            if not attempt.wanted and not attempt.controlled.ended:
                self._halt(attempt)

    def staged(self, attempt: RequestAttempt, number: int) -> None:
        """Continue a halted decode on the group that is wanted now; its KV is staged on instance `number`."""
        attempt.stopping = attempt.halts = False
        attempt.at, attempt.whole = None, {number}
        # The instance dropped the prompt when its scheduler took the request: it needs it again for spans.
        attempt.admitted.discard(number)
        self.halted += 1
        group = attempt.wanted
        if self._several(group):
            self._steps.take_up(attempt, number)
            self._steps.next(attempt, group)
        elif group:
            self._decode(attempt, group)

    def computed(self, number: int, attempt: RequestAttempt, message: SpanTaskDone) -> bool:
        """Handle one instance's part of a token that a group decodes; True if the answer is complete with it."""
        if not self._steps.done(number, attempt, message):
            return False
        if attempt.wanted and not attempt.finished:
            self._go(attempt)
        else:
            # Slices that waited for the token go now: the KV does not grow any more, so its size is known.
            attempt.stopping = False
        return attempt.finished

    def _decode(self, attempt: RequestAttempt, group: tuple[int, ...]) -> None:
        """Begin a decode that no instance computes now, in the cheapest way that its KV allows."""
        # An instance of the group that has all KV decodes at once; of several the lowest number.
        ready = sorted((attempt.whole | attempt.controlled.kv_at) & set(group))
        if ready:
            self._go_on(attempt, ready[0])
        elif attempt.spread and self._several(group):
            self._steps.begin(attempt)
            self._steps.next(attempt, group)
        # Not even the instance with the most free tokens can hold all of it: decode where the KV lies, for now.
        elif attempt.spread and not self._fits(attempt, self._home(attempt, group)):
            self._steps.begin(attempt)
            self._steps.next(attempt, attempt.spread)
        elif attempt.whole or attempt.spread:
            self._gather(attempt, self._home(attempt, group))
        # No KV is left, as with a policy that had the prompt computed elsewhere: prefill again from the start.
        else:
            self.submit(attempt, self._registry.kv.roomiest(group))

    def _go(self, attempt: RequestAttempt) -> None:
        """Begin the next token of a decode whose KV is spread: on the wanted group, or where the KV lies."""
        group = attempt.wanted
        if self._several(group):
            self._steps.next(attempt, group)
        elif self._fits(attempt, home := self._home(attempt, group)):
            self._gather(attempt, home)
        else:
            self._steps.next(attempt, attempt.spread)

    def _gather(self, attempt: RequestAttempt, home: int) -> None:
        attempt.gathers = True
        self._moves.gather(attempt, home, lambda: self._go_on(attempt, home))

    def _go_on(self, attempt: RequestAttempt, home: int) -> None:
        """Decode on `home`, which has all KV, and free it elsewhere."""
        attempt.gathers = False
        self._steps.end(attempt)
        self.submit(attempt, home, "decode")
        # Before `whole` changes: `leave` takes from it the instances whose copies are to be freed.
        self._registry.leave(attempt, but=(home,))
        attempt.spread, attempt.whole = (), {home}
        self._moves.settled(attempt)
        self._stay(attempt)

    def _stay(self, attempt: RequestAttempt) -> None:
        """Leave a decode on its scheduler if that is the wanted place; else halt it."""
        if attempt.at in attempt.wanted and not self._several(attempt.wanted):
            attempt.stopping = False
        else:
            self._halt(attempt)

    def _halt(self, attempt: RequestAttempt) -> None:
        """Take a decode off its scheduler. Where KV cannot move it continues there, whatever the policy wants."""
        at = attempt.at
        attempt.stopping = attempt.stopping or at is not None
        # One `PauseRequest` is enough; a delta with `staged`, or the last one, answers it.
        if at is None or attempt.halts:
            return
        if not self._registry[at].moves_kv:
            attempt.stopping = False
            return
        attempt.halts = True
        self._registry.tell((at,), PauseRequest(attempt.wire))

    def _several(self, group: tuple[int, ...]) -> bool:
        """Whether a group is to decode in place."""
        return self._in_place and len(group) > 1 and all(self._registry[i].moves_kv for i in group)

    def _home(self, attempt: RequestAttempt, group: tuple[int, ...]) -> int:
        """Return the instance of a group with the most free tokens for a request; of equals the lowest number."""
        return max(sorted(group), key=lambda number: self._room(attempt, number))

    def _fits(self, attempt: RequestAttempt, number: int) -> bool:
        """Whether an instance has free tokens for all of a request's KV at the end of its output."""
        return self._room(attempt, number) >= attempt.kv_tokens + attempt.asked.left

    def _room(self, attempt: RequestAttempt, number: int) -> int:
        """Return an instance's free tokens for this request: those that it has reserved there count as free."""
        reserved = attempt.room.get(number)
        return self._registry.kv.room(number) + (0 if reserved is None else reserved.tokens)
