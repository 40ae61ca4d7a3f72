"""How urgent each waiting prefill is: isolated times, deadlines, and the policy's line."""

from __future__ import annotations

from headway.core.request import Request
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.ordering import UrgencyLine, make_policy
from headway.policy.iteration.queue import WaitingQueue
from headway.policy.iteration.sequence import SequenceState


class UrgencyOrder:
    """Keeps a queue's lines right. `incumbent` is the long request that ran last."""

    def __init__(self, config: SchedulerConfig, prefill_times: PrefillCache) -> None:
        self._config = config
        self.policy = make_policy(config.policy)
        self.prefill_times = prefill_times
        self.incumbent: SequenceState | None = None

    def is_long(self, request: Request) -> bool:
        """Medha's IsLong is a token count made for its GPUs; on a slow machine shorter ones are long: time counts."""
        config = self._config
        if request.prompt_tokens > config.long_tokens:
            return True
        alone_s = self.prefill_times.remaining_s(request.prompt_tokens, request.cached_tokens)
        return 0 < config.long_iterations * config.t_target_s < alone_s

    def assess(self, sequence: SequenceState) -> UrgencyLine:
        """A new request's isolated time and deadline, and with them its line."""
        sequence.total_s = sequence.work_s = self._work_s(sequence)
        ttft_s = sequence.request.slo.ttft_s
        if ttft_s is None:
            ttft_s = max(self._config.deadline_base_s, self._config.deadline_factor * sequence.total_s)
        sequence.deadline_s = sequence.request.arrival_s + ttft_s
        return self.policy.line(sequence.facts(sequence.work_s))

    def line(self, sequence: SequenceState) -> UrgencyLine:
        """Of a request whose progress has changed."""
        sequence.work_s = self._work_s(sequence)
        line = self.policy.line(sequence.facts(sequence.work_s))
        if sequence is self.incumbent:
            return UrgencyLine(line.intercept - self._config.quantum * sequence.total_s * line.slope, line.slope)
        return line

    def sit(self, sequence: SequenceState, queue: WaitingQueue) -> None:
        """The long request that ran last keeps its place by a quantum, lest equally urgent ones alternate."""
        before, self.incumbent = self.incumbent, sequence
        if before is not None and before is not sequence and before.slot >= 0:
            queue.update(before, self.line(before))

    def _work_s(self, sequence: SequenceState) -> float:
        return max(1e-6, self.prefill_times.remaining_s(sequence.known, sequence.scheduled))
