"""How urgent each waiting prefill is: isolated times, deadlines, and the policy's line."""

from __future__ import annotations

from headway.core.request import Request
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.ordering import UrgencyLine, make_policy
from headway.policy.iteration.prefill import PrefillState
from headway.policy.iteration.queue import WaitingQueue


class UrgencyOrder:
    """Keeps a queue's lines right. `active_long` is the long request that ran last."""

    def __init__(self, config: SchedulerConfig, prefill_times: PrefillCache) -> None:
        self._config = config
        self.policy = make_policy(config.policy)
        self.prefill_times = prefill_times
        self.active_long: PrefillState | None = None

    def is_long(self, request: Request) -> bool:
        """Medha's IsLong is a token count made for its GPUs; on a slow machine shorter ones are long: time counts."""
        config = self._config
        if request.prompt_tokens > config.long_tokens:
            return True
        alone_s = self.prefill_times.remaining_s(request.prompt_tokens, request.cached_tokens)
        return 0 < config.long_iterations * config.t_target_s < alone_s

    def assess(self, state: PrefillState) -> UrgencyLine:
        """A new request's isolated time and deadline, and with them its line."""
        state.total_s = state.work_s = self._work_s(state)
        ttft_s = state.request.slo.ttft_s
        if ttft_s is None:
            ttft_s = max(self._config.deadline_base_s, self._config.deadline_factor * state.total_s)
        state.deadline_s = state.request.arrival_s + ttft_s
        return self.policy.line(state.facts(state.work_s))

    def line(self, state: PrefillState) -> UrgencyLine:
        """Of a request whose progress has changed."""
        state.work_s = self._work_s(state)
        line = self.policy.line(state.facts(state.work_s))
        if state is self.active_long:
            return UrgencyLine(line.intercept - self._config.quantum * state.total_s * line.slope, line.slope)
        return line

    def mark_active(self, state: PrefillState, queue: WaitingQueue) -> None:
        """The long request that ran last keeps its place by a quantum, lest equally urgent ones alternate."""
        before, self.active_long = self.active_long, state
        if before is not None and before is not state and before.slot >= 0:
            queue.update(before, self.line(before))

    def _work_s(self, state: PrefillState) -> float:
        return max(1e-6, self.prefill_times.remaining_s(state.known, state.scheduled))
