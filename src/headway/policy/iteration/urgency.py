"""Urgency of waiting prefills: isolated times, deadlines, and the policy's line."""

from __future__ import annotations

from headway.core.request import Request
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.ordering import UrgencyLine, make_policy
from headway.policy.iteration.prefill import LONG, ONE_ITERATION, SEVERAL_ITERATIONS, PrefillState
from headway.policy.iteration.queue import WaitingQueue
from headway.policy.iteration.relegation import RelegationChoice


class UrgencyOrder:
    """Urgency lines of one group's prefills. The caller stores them in the queue."""

    def __init__(self, config: SchedulerConfig, prefill_times: PrefillCache, aim_s: float) -> None:
        """`aim_s`: seconds of a usual iteration, the unit of `long_iterations`."""
        self._config = config
        self._aim_s = aim_s
        self.policy = make_policy(config.policy)
        self.prefill_times = prefill_times
        # The long request that got tokens last; it keeps its place by a quantum.
        self.active_long: PrefillState | None = None
        # None: all requests keep the policy's order, however late.
        self.relegation = RelegationChoice(config.relegated_share) if config.relegation else None

    def size(self, request: Request) -> int:
        """Return the size of a request: by its uncached tokens or their isolated time."""
        return self.size_of_work(request.prompt_tokens, request.cached_tokens)

    def size_of_work(self, tokens: int, cached: int) -> int:
        """Return the size of `tokens` tokens but for the cached ones.

        Long by their number (Medha's IsLong, made for its GPUs) or by their isolated time: on a slow processor prompts
        below `long_tokens` take many iterations too."""
        config = self._config
        if tokens - cached > config.long_tokens:
            return LONG
        # Paper mode: tokens only.
        if not config.long_iterations:
            return ONE_ITERATION
        iterations = self.prefill_times.remaining_s(tokens, cached) / self._aim_s
        return LONG if iterations > config.long_iterations else SEVERAL_ITERATIONS if iterations > 1 else ONE_ITERATION

    def assess(self, state: PrefillState) -> UrgencyLine:
        """Set a new request's isolated time and deadline. Return its line."""
        state.total_s = state.work_s = self._work_s(state)
        ttft_s = state.request.slo.ttft_s
        if ttft_s is None:
            ttft_s = max(self._config.deadline_base_s, self._config.deadline_factor * state.total_s)
        state.deadline_s = state.request.arrival_s + ttft_s
        line = self.policy.line(state.facts(state.work_s))
        return line if self.relegation is None else self.relegation.line(state, line)

    def line(self, state: PrefillState) -> UrgencyLine:
        """Return the line of a request whose progress has changed."""
        state.work_s = self._work_s(state)
        line = self.policy.line(state.facts(state.work_s))
        if self.relegation is not None and self.relegation.reorders:
            return self.relegation.line(state, line)
        if state is self.active_long:
            # A share `quantum` of its isolated time, in units of the key: total_s * slope is 1 under LARS.
            return UrgencyLine(line.intercept - self._config.quantum * state.total_s * line.slope, line.slope)
        return line

    def mark_active(self, state: PrefillState, queue: WaitingQueue) -> None:
        """Note the long request that got tokens last.

        It keeps its place by a quantum, so that equally urgent ones do not alternate."""
        before, self.active_long = self.active_long, state
        if before is not None and before is not state and before.slot >= 0:
            queue.update(before, self.line(before))

    def _work_s(self, state: PrefillState) -> float:
        """Return the isolated seconds left; above 0, since policies divide by it."""
        return max(1e-6, self.prefill_times.remaining_s(state.known, state.scheduled))
