"""Medha's scheduler (arXiv 2409.17264): length-aware relative slack, and space sharing of iterations.

The order is that of `lars`, Algorithm 3 is `perf.latency.base.PrefillCache`, Algorithms 1 and 2 are here: at most one
long prompt has tokens in an iteration, and it leaves a share of the time to shorter ones. `mode` "paper" is literal;
"default" is it with our rulings (docs/concepts/medha.md). Another order may run under the same rules, as Medha's own
baselines do. The default policy passes through none of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from headway.core.errors import ConfigError
from headway.perf.latency.base import BatchLoad, LatencyModel, PrefillCache, load_s
from headway.policy.iteration.ordering import UrgencyLine
from headway.policy.iteration.requests import PrefillState

Mode = Literal["default", "paper"]

SHORT: Final = 0
"""A prompt that takes at most one usual iteration alone; cached tokens do not count."""
SEVERAL: Final = 1
"""One that takes more, and is not long."""
LONG: Final = 2

LEAST_AIM_S: Final = 0.055
"""Ruling: where no target is configured, a prompt gets its share of so long an iteration, seconds."""
PAPER_T_TARGET_S: Final = 0.020
"""Medha's target between two tokens, seconds."""
SHARED_S: Final = 0.2
"""Ruling: a prompt gets its share of at most so long an iteration, however long a gap was chosen for long prompts."""


@dataclass(frozen=True, kw_only=True)
class MedhaConfig:
    """Settings of Medha's rules. Raises ConfigError on an impossible value."""

    mode: Mode = "default"
    """"paper": as printed."""
    space_sharing: bool = True
    """Whether long prompts yield part of their time to shorter ones (Algorithm 2)."""
    long_tokens: int = 8192
    """Prompts above this are long (`IsLong` of Algorithm 1)."""
    long_iterations: float | None = None
    """So are prompts that take more than so many iterations alone; None: 4, in mode "paper" 0 (tokens only)."""
    exact_target: bool = True
    """Whether iterations take all of `t_target_s`, and no more where nothing decodes."""
    deadline_base_s: float = 1.0
    deadline_factor: float = 5.0
    """Without an SLO a first token is due after max(base, factor × its prefill alone): Medha defines no deadline."""

    def __post_init__(self) -> None:
        if self.mode not in ("default", "paper"):
            raise ConfigError(f"medha.mode must be 'default' or 'paper', not {self.mode!r}")
        if self.long_tokens < 0 or (self.long_iterations is not None and self.long_iterations < 0):
            raise ConfigError("medha.long_tokens and medha.long_iterations must be 0 or more")
        if self.deadline_base_s < 0 or self.deadline_factor <= 0:
            raise ConfigError("medha.deadline_base_s must be 0 or more, and medha.deadline_factor above 0")

    @property
    def literal(self) -> bool:
        return self.mode == "paper"

    @property
    def iterations(self) -> float:
        """`long_iterations` with its default."""
        return self.long_iterations if self.long_iterations is not None else 0.0 if self.literal else 4.0

    @property
    def rho(self) -> tuple[float, float]:
        """Least and largest share of the time that is yielded. Ruling: a late prompt yields too."""
        return (0.0, 0.4) if self.literal else (0.2, 0.7)

    @property
    def quantum(self) -> float:
        """Ruling: a running long prompt keeps its place until another is more urgent by this share."""
        return 0.0 if self.literal else 0.02

    @property
    def stretch(self) -> float:
        """Ruling: share by which an iteration may exceed its aim where that completes a short prompt."""
        return 0.0 if self.literal else 0.15


class MedhaRules:
    """Algorithms 1 and 2 over the queue of one group."""

    def __init__(
        self, config: MedhaConfig, prefill_times: PrefillCache, aim_s: float, t_target_s: float | None
    ) -> None:
        """`aim_s`: seconds of a usual iteration. `t_target_s`: as configured."""
        self.config = config
        self._times = prefill_times
        self._aim_s = aim_s
        longest_s = float("inf") if config.literal or config.exact_target else SHARED_S
        self._shared_s = min(t_target_s or LEAST_AIM_S, longest_s)
        # The long request that got tokens last; it keeps its place by a quantum.
        self.active: PrefillState | None = None
        # The smallest size of requests that leave time to smaller ones in this iteration; `LONG` + 1: none.
        self.yields_from = LONG + 1
        # Seconds of the decodes in this iteration, of which prompts of several iterations get no share.
        self._unshared_s = 0.0
        # Whether a long prompt has tokens in this iteration, and the first request that found no time in it.
        self.has_long = False
        self.skipped: PrefillState | None = None

    def size(self, state: PrefillState, cached: int) -> int:
        """Return the size of a request: by its uncached tokens (Medha's `IsLong`), or (ruling) their isolated time: on
        a slow processor prompts below `long_tokens` take many iterations too."""
        config = self.config
        if state.known - cached > config.long_tokens:
            return LONG
        if not config.iterations:
            return SHORT
        iterations = self._times.remaining_s(state.known, cached) / self._aim_s
        return LONG if iterations > config.iterations else SEVERAL if iterations > 1 else SHORT

    def line(self, state: PrefillState, line: UrgencyLine) -> UrgencyLine:
        """Return the line of a request: that of the policy, moved by the quantum for the active long one."""
        if state is not self.active:
            return line
        # A share `quantum` of its isolated time, in units of the key: total_s * slope is 1 under LARS.
        return UrgencyLine(line.intercept - self.config.quantum * state.total_s * line.slope, line.slope)

    def begin(
        self,
        load: BatchLoad,
        latency: LatencyModel,
        queue: Iterable[PrefillState],
        free_blocks: bool,
        shorts_elsewhere: bool,
    ) -> None:
        """Begin an iteration, whose decodes are `load`. `free_blocks`: whether a request without KV may begin.
        `shorts_elsewhere`: short prompts wait in other groups of the same batch."""
        self.yields_from, self._unshared_s = LONG + 1, 0.0
        self.has_long, self.skipped = False, None
        if not self.config.space_sharing:
            return
        waiting = list(queue)
        sizes = {state.medha_size for state in waiting if state.holds_kv or free_blocks}
        if SHORT in sizes and any(state.medha_size == SEVERAL for state in waiting):
            self.yields_from, self._unshared_s = SEVERAL, load_s(latency, load)
        # Ruling: a long prompt yields only while a shorter one waits.
        elif shorts_elsewhere or self.config.literal or sizes & {SHORT, SEVERAL}:
            self.yields_from = LONG

    @staticmethod
    def shorts_wait(queue: Iterable[PrefillState], free_blocks: bool) -> bool:
        """Whether a prompt waits that is not long and could use yielded time."""
        return any(state.medha_size < LONG and (state.holds_kv or free_blocks) for state in queue)

    def may_have(self, state: PrefillState) -> bool:
        """Whether a request may have tokens in this iteration: one long prompt has (Algorithm 1), the most urgent."""
        return not (self.has_long and state.medha_size == LONG)

    def refused(self, state: PrefillState) -> None:
        """Note that a request found no time in this iteration."""
        self.skipped = self.skipped or state

    def completing_s(self, state: PrefillState, budget_s: float) -> float:
        """Return the longest iteration, seconds, that completes a short prompt which does not yield; 0: none other."""
        return budget_s * (1.0 + self.config.stretch) if state.medha_size < LONG and not self.yields(state) else 0.0

    def yields(self, state: PrefillState) -> bool:
        """Whether a request leaves time to smaller ones in this iteration."""
        return state.medha_size >= self.yields_from

    def longest_s(self, state: PrefillState, budget_s: float, now: float) -> float:
        """Return the longest iteration, seconds, that a chunk of a request may make (Algorithm 2).

        The share that is yielded is its relative slack, clamped: the more time a prompt has, the more it yields."""
        if not self.yields(state):
            return budget_s
        least, most = self.config.rho
        slack = (state.deadline_s - now - state.work_s) / max(state.total_s, 1e-9)
        # Ruling: a prompt of several iterations yields only of what decodes leave.
        unshared_s = 0.0 if state.medha_size == LONG else min(self._unshared_s, budget_s)
        return unshared_s + min(budget_s - unshared_s, self._shared_s) * (1.0 - min(most, max(least, slack)))
