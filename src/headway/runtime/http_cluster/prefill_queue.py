"""Predicted prefill time of each HTTP instance: what its own scheduler predicts, or a latency model, times a factor
that is learned from its first tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.perf.latency.groups import GroupLatency, GroupShape

ALONE = GroupShape(1)
_LEARNING_RATE = 0.3
"""Weight of the newest measurement, after the first."""
_LEAST_LEFT = 0.05
"""Least share of the predicted time that is left while a prompt is computed, however late it is."""


class LearnedLatency(GroupLatency):
    """A latency model times the instances' mean factor: what a policy plans with. One for each cluster."""

    def __init__(self, base: GroupLatency) -> None:
        self.base = base
        self._factors: dict[int, float] = {}
        """Measured over predicted seconds of each instance that was measured: its own prediction, if it has one."""
        self._reported: dict[int, tuple[list[int], list[float]]] = {}
        """Of instances that predict prompts themselves: tokens of prompts, and their seconds over the model's."""

    @property
    def source(self) -> str:
        return f"{self.base.source}, times {self.factor():.3g} as measured"

    def factor(self, instance: int | None = None, tokens: int = 0) -> float:
        """Return an instance's factor for prompts of so many tokens; the mean of all where it is not known, or for
        None."""
        known = self._factors.keys() | self._reported.keys()
        if instance in known:
            return self._reported_ratio(instance, tokens) * self._factors.get(instance, 1.0)
        return sum(self.factor(each, tokens) for each in known) / len(known) if known else 1.0

    def relative(self, instance: int, tokens: int) -> float:
        """Return an instance's factor for prompts of so many tokens over the mean of all."""
        return self.factor(instance, tokens) / max(self.factor(None, tokens), 1e-9)

    def _reported_ratio(self, instance: int | None, tokens: int) -> float:
        """Return what an instance predicts over what the model does; 1 where it predicts nothing."""
        points = None if instance is None else self._reported.get(instance)
        return 1.0 if points is None else float(np.interp(tokens, *points))

    def report(self, instance: int, points: Sequence[tuple[int, float]]) -> None:
        """Take in what an instance predicts: tokens of prompts, ascending, and their seconds alone. None: nothing."""
        ratios = [seconds / max(self.base.prefill_s(0, tokens, ALONE), 1e-9) for tokens, seconds in points]
        if (self._reported.pop(instance, None) is None) == bool(points):
            # what was measured was over another prediction
            self._factors.pop(instance, None)
        if points:
            self._reported[instance] = [tokens for tokens, _ in points], ratios

    def forget(self, instance: int) -> None:
        """Forget what an instance that is gone predicted, and its factor: the mean is of the others."""
        self._reported.pop(instance, None)
        self._factors.pop(instance, None)

    def learn(self, instance: int, prompt_tokens: int, measured_s: float) -> None:
        """Take in the time of a prompt that an instance computed alone."""
        predicted_s = self.base.prefill_s(0, prompt_tokens, ALONE) * self._reported_ratio(instance, prompt_tokens)
        ratio = measured_s / max(predicted_s, 1e-9)
        before = self._factors.get(instance)
        self._factors[instance] = ratio if before is None else before + _LEARNING_RATE * (ratio - before)

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        return self.base.prefill_s(past, tokens, group) * self.factor(tokens=past + tokens)

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        first = self.base.solve_tokens(past, budget_s / self.factor(tokens=past), group)
        return self.base.solve_tokens(past, budget_s / self.factor(tokens=past + first), group)

    def prompt_s(self, instance: int, prompt_tokens: int) -> float:
        """Return the seconds of a whole prompt, alone on an instance."""
        return self.base.prefill_s(0, prompt_tokens, ALONE) * self.factor(instance, prompt_tokens)


class PrefillQueue:
    """Prompts on one instance without a first token, and when they are expected to be computed.

    They count as computed one after another: where they share iterations, the last one ends at the same time."""

    def __init__(self, instance: int, latency: LearnedLatency) -> None:
        self._instance, self._latency = instance, latency
        self._waiting: dict[str, tuple[int, float]] = {}
        """Prompt tokens and predicted seconds, by request."""
        self._resident: set[str] = set()
        self._since_s = 0.0
        """Since when the present prompts are computed."""
        self._alone: tuple[str, float] | None = None
        """The request that has been alone since it was sent, and when that was."""

    def add(self, request: str, prompt_tokens: int, now: float) -> None:
        """Add a request that was sent to the instance."""
        # With decodes beside it, a prompt takes longer than the model says.
        self._alone = None if self._resident else (request, now)
        if not self._waiting:
            self._since_s = now
        self._waiting[request] = (prompt_tokens, self._latency.prompt_s(self._instance, prompt_tokens))
        self._resident.add(request)

    def first_token(self, request: str, now: float) -> None:
        """Record that a prompt is computed. Harmless when repeated."""
        tokens, _ = self._waiting.pop(request, (0, 0.0))
        if tokens and self._alone is not None and self._alone[0] == request:
            self._latency.learn(self._instance, tokens, now - self._alone[1])
        self._since_s = now

    def remove(self, request: str, now: float) -> None:
        """Remove a request that has ended or left. Harmless when repeated."""
        if self._waiting.pop(request, None) is not None:
            self._since_s = now
        self._resident.discard(request)

    def report(self, points: Sequence[tuple[int, float]]) -> None:
        """See `LearnedLatency.report`."""
        self._latency.report(self._instance, points)

    def clear(self) -> None:
        """Remove all requests: the instance is gone."""
        self._waiting.clear()
        self._resident.clear()
        self._latency.forget(self._instance)

    @property
    def requests(self) -> int:
        """Number of requests on the instance."""
        return len(self._resident)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens without a first token."""
        return sum(tokens for tokens, _ in self._waiting.values())

    @property
    def unanswered(self) -> int:
        """Number of requests without a first token."""
        return len(self._waiting)

    def left_s(self, now: float) -> float:
        """Return the predicted seconds until all prompts are computed; 0.0 without any."""
        total = sum(seconds for _, seconds in self._waiting.values())
        return max(total - (now - self._since_s), _LEAST_LEFT * total)
