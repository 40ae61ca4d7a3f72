"""The life of a request that is served whole by one instance at a time: its state, and the output that its client has.

Every change of state is one of `RequestLifecycle`'s methods, and `TRANSITIONS` has all that are allowed. There is no
clock and no I/O: a driver reports what has happened. When an instance is lost the request is tried again on another,
whose prompt is the prompt and all output so far, so that the client's answer goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from headway.core.errors import InvariantError

RequestState = Literal["queued", "placed", "prefilling", "decoding", "paused", "retrying", "finished", "failed"]
"""placed: sent to an instance, which has not accepted it. paused: taken off its instance by the policy. retrying: its
instance was lost or refused it. A cancelled request has failed."""

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    "queued": frozenset(("placed", "failed")),
    # A short answer may arrive whole with its acceptance.
    "placed": frozenset(("prefilling", "paused", "retrying", "failed")),
    "prefilling": frozenset(("decoding", "finished", "paused", "retrying", "failed")),
    "decoding": frozenset(("finished", "paused", "retrying", "failed")),
    "paused": frozenset(("placed", "retrying", "failed")),
    "retrying": frozenset(("placed", "failed")),
    "finished": frozenset(),
    "failed": frozenset(),
}
"""States that may follow each state."""

_ON_INSTANCE = ("placed", "prefilling", "decoding")


class AttemptContinuation(msgspec.Struct, frozen=True):
    """What an instance has to compute now."""

    output: tuple[int, ...]
    """Output tokens that become part of the prompt."""
    max_tokens: int
    """Output tokens that may still come."""
    min_tokens: int
    """Output tokens before which the answer must not end."""


class RequestLifecycle:
    """State of one request, from its arrival to its last token or its error. Methods raise InvariantError where
    `TRANSITIONS` does not allow the change."""

    __slots__ = ("_restarts", "_skipped", "attempts", "instance", "losses", "max_tokens", "min_tokens", "output",
                 "refusals", "state")  # fmt: skip

    def __init__(
        self, max_tokens: int, min_tokens: int = 0, output: Sequence[int] = (), *, restarts: bool = False
    ) -> None:
        """output: tokens that the client had before. restarts: another attempt begins with the bare prompt and its
        tokens are compared with those that the client has, instead of continuing after them: needed where the next
        token depends on more than the tokens before it (penalties on output alone)."""
        self.state: RequestState = "queued"
        self.max_tokens, self.min_tokens = max_tokens, min_tokens
        self.output = list(output)
        """Output tokens that the client has."""
        self.instance: int | None = None
        """Instance that computes it now."""
        self.attempts = 0
        """Number of times that it was sent to an instance."""
        self.losses = 0
        """Number of attempts that were lost."""
        self.refusals = 0
        """Number of attempts that an instance was too busy for, since the last token."""
        self._restarts = restarts
        self._skipped = 0

    @property
    def over(self) -> bool:
        """Whether nothing follows."""
        return self.state in ("finished", "failed")

    @property
    def on_instance(self) -> bool:
        """Whether an instance has it now."""
        return self.state in _ON_INSTANCE

    def place(self, instance: int) -> AttemptContinuation:
        """Record that it is sent to an instance; return what to send."""
        self._to("placed")
        self.instance = instance
        self.attempts += 1
        if self._restarts:
            self._skipped = 0
            return AttemptContinuation((), self.max_tokens, self.min_tokens)
        done = len(self.output)
        self._skipped = done
        return AttemptContinuation(tuple(self.output), self.max_tokens - done, max(0, self.min_tokens - done))

    def accept(self) -> None:
        """Record that the instance has accepted it."""
        self._to("prefilling")

    def receive(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Record tokens of the instance's answer; return those that the client does not have yet.

        Raises InvariantError when an attempt that begins anew repeats other tokens than the client has."""
        if self.state == "prefilling" and tokens:
            self._to("decoding")
        if self.state not in ("prefilling", "decoding"):
            raise InvariantError(f"a request that is {self.state} has no output")
        known = self.output[self._skipped : self._skipped + len(tokens)]
        if list(tokens[: len(known)]) != known:
            raise InvariantError("the answer differs from the one before its instance was lost")
        self._skipped += len(tokens)
        new = tuple(tokens[len(known) :])
        if len(self.output) + len(new) > self.max_tokens:
            raise InvariantError(f"an instance has sent more than the {self.max_tokens} tokens that were wanted")
        self.output += new
        if new:
            self.refusals = 0
        return new

    def pause(self) -> None:
        """Record that it was taken off its instance, to continue later."""
        self._to("paused")
        self.instance = None

    def lose(self) -> None:
        """Record that its instance was lost, or its stream broke off."""
        self._to("retrying")
        self.instance = None
        self.losses += 1

    def refuse(self) -> None:
        """Record that its instance is too busy for it."""
        self._to("retrying")
        self.instance = None
        self.refusals += 1

    def finish(self) -> None:
        """Record its end, with all of its output."""
        self._to("finished")
        self.instance = None

    def fail(self) -> None:
        """Record its end by an error, or by its client's leave. No effect when it has ended."""
        if not self.over:
            self._to("failed")
            self.instance = None

    def _to(self, state: RequestState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantError(f"a request that is {self.state} cannot become {state}")
        self.state = state
