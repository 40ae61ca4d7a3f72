"""Settings of a scheduler, with their `--help` texts and limits."""

# ruff: noqa: RUF009 - `_f` is `dataclasses.field`

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headway.core.errors import ConfigError
from headway.policy.iteration.chunking_strategies import make_chunking
from headway.policy.iteration.ordering import make_policy

Mode = Literal["default", "paper"]
PipelineSchedule = Literal["stream", "microbatch"]


def _f(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


FOLLOWS_FROM_LAYOUT = frozenset(("stages", "kv_parallel", "kv_shard_tokens", "interruptible_layers"))
"""Fields of `SchedulerConfig` that are no settings: they follow from the model and how it is spread."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Settings of one instance's scheduler. Raises ConfigError on an impossible value."""

    policy: str = _f(
        "lars", "order of waiting prefills: fcfs, edf, lrs, srpt, preflow, lars, or a class by its path, module.Class"
    )
    chunking: str = _f("adaptive", "tokens of a prompt per iteration: adaptive (by time), static:N (tokens), whole")
    mode: Mode = _f("default", "'paper': the papers literally; 'default': our rulings (docs/concepts/scheduling.md)")
    t_target_s: float | None = _f(
        None,
        "longest gap between tokens of running requests, seconds: given, no iteration beside them is aimed beyond it; "
        "default: 55 ms, or what an efficient chunk takes on this machine, up to 200 ms; paper: 20 ms",
    )
    newcomer_wait_s: float | None = _f(
        None,
        "longest iteration while nothing decodes, seconds: a request that arrives waits for its end; default: what an "
        "efficient chunk takes, and up to 1 s where arrivals are rare; paper: 0 (never above t_target_s)",
    )
    background_wait_s: float | None = _f(
        None,
        "longest iteration with tokens of a document that is prepared, seconds: requests that arrive wait for its end, "
        "or in an engine of one process for the end of a layer; longer ones prepare faster; default: 10 ms, or 1 ms a "
        "layer, more where arrivals are rare or the context is long",
    )
    max_num_seqs: int = _f(256, "requests that hold KV at the same time, in each KV group")
    max_num_batched_tokens: int = _f(8192, "tokens of one iteration (a whole prompt may exceed it, alone)")
    least_gain: float = _f(
        3.0,
        "an iteration may take so many times what it costs to run one token, lest chunks pay for overhead; paper: 0",
    )
    useful_share: float = _f(
        0.99,
        "iterations are no longer than those whose chunks reach this share of the best tokens per second, whatever "
        "t_target_s allows; 1: as long as it allows (paper)",
    )
    stretch: float = _f(
        0.15, "share by which an iteration may exceed its aim where that completes a short prompt; paper: 0"
    )
    even_rows: bool = _f(
        False, "cut prompts where the tokens of an iteration are one of 16 sizes to the next power of two, which recur"
    )
    min_chunk: int = _f(8, "smallest chunk of a prompt that is worth an iteration, tokens; 0: none (paper)")
    progress_every: int = _f(8, "the first waiting prefill advances by min_chunk at least every so many iterations")
    long_tokens: int = _f(8192, "prompts above this are long: at most one of them in an iteration, and it may yield")
    long_iterations: float = _f(
        4.0, "so are prompts that take more than so many iterations alone; paper: 0 (tokens only)"
    )
    space_sharing: bool | None = _f(
        None, "prompts of several iterations yield part of their time to shorter ones (default: with lars only)"
    )
    rho_max: float = _f(0.7, "largest share of an iteration that is yielded")
    rho_min: float = _f(0.2, "share that is yielded even when the own deadline is lost; paper: 0")
    yield_only_to_shorts: bool = _f(True, "yield only while a smaller prefill waits; paper: always")
    subtract_times: bool = _f(False, "size chunks by (budget - time so far), as printed in Algorithm 2; paper: true")
    quantum: float = _f(0.02, "a running long keeps its place until another is more urgent by this share; paper: 0")
    deadline_base_s: float = _f(1.0, "TTFT deadline without an SLO: max(base, factor × isolated prefill time), seconds")
    deadline_factor: float = _f(5.0, "the factor of the same")
    relegation: bool = _f(
        False, "when not all deadlines can be met, give up the fewest requests and serve those behind the others"
    )
    relegated_share: float = _f(0.05, "share of the prefill work that requests so given up get, the oldest first")
    prefill_share: float = _f(
        1.0, "share of the time for prefills while requests decode, in turns; 0: by the pressure on both; 1: no turns"
    )
    reserve_tokens: int = _f(1024, "KV reserved beyond what is known, in tokens; grown by as much on demand")
    kv_headroom: float = _f(0.05, "share of the KV pool that long requests leave free for shorts")
    admission_age_s: float = _f(10.0, "a request skipped for want of KV for so long stops later ones from entering")
    stages: int = _f(1, "pipeline stages: batches in flight")
    kv_parallel: int = _f(1, "KV groups: replicas that each hold a shard of a long request's cache")
    interruptible_layers: int = _f(
        0, "layers between which an arrival interrupts iterations of prepared documents; 0: nothing does"
    )
    kv_shard_tokens: int | None = _f(None, "tokens a KV group holds of one request; default: what t_target_s allows")
    pipeline_schedule: PipelineSchedule = _f("stream", "stream: a prompt's next chunk enters when stage 0 frees (SPP)")

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {rule}, not {getattr(self, name)!r}")

        # Both raise ConfigError for an unknown name.
        make_policy(self.policy)
        make_chunking(self.chunking)
        need(self.t_target_s is None or self.t_target_s > 0, "t_target_s", "above 0")
        need(self.newcomer_wait_s is None or self.newcomer_wait_s >= 0, "newcomer_wait_s", "0 or more")
        need(self.background_wait_s is None or self.background_wait_s > 0, "background_wait_s", "above 0")
        need(self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        need(self.max_num_batched_tokens >= 1, "max_num_batched_tokens", "at least 1")
        need(0 <= self.rho_max < 1, "rho_max", "at least 0 and below 1")
        need(0 <= self.rho_min <= self.rho_max, "rho_min", f"between 0 and rho_max, {self.rho_max:g}")
        for name in ("min_chunk", "long_tokens", "long_iterations", "least_gain", "quantum", "deadline_base_s",
                     "deadline_factor", "reserve_tokens", "admission_age_s"):  # fmt: skip
            need(getattr(self, name) >= 0, name, "0 or more")
        need(0 < self.useful_share <= 1, "useful_share", "above 0 and at most 1")
        need(self.stretch >= 0, "stretch", "0 or more")
        need(self.progress_every >= 1, "progress_every", "at least 1")
        need(0 < self.relegated_share < 1, "relegated_share", "between 0 and 1")
        need(0 <= self.prefill_share <= 1, "prefill_share", "from 0 to 1")
        need(0 <= self.kv_headroom < 1, "kv_headroom", "in [0, 1)")
        need(self.stages >= 1, "stages", "at least 1")
        need(self.kv_parallel >= 1, "kv_parallel", "at least 1")
        need(self.interruptible_layers >= 0, "interruptible_layers", "0 or more")
        alone = self.stages == self.kv_parallel == 1
        need(alone or not self.interruptible_layers, "interruptible_layers", "0 with stages or KV groups")
        need(self.kv_shard_tokens is None or self.kv_shard_tokens >= 1, "kv_shard_tokens", "at least 1")
        need(self.mode in ("default", "paper"), "mode", "'default' or 'paper'")

    @property
    def shares_space(self) -> bool:
        """Whether a long prefill yields time to shorts: as set, else under LARS only."""
        return self.policy == "lars" if self.space_sharing is None else self.space_sharing

    @property
    def gap_stages(self) -> int:
        """Stage times that the gap between two tokens of a request may take. A token that leaves the last of several
        stages may find the first one busy for one more; Medha §4.2 counts the stages only (mode `paper`)."""
        return self.stages if self.stages == 1 or self.mode == "paper" else self.stages + 1

    @classmethod
    def named(cls, mode: Mode, **fields: Any) -> SchedulerConfig:
        """The settings of a mode, with `fields` on top. Raises ConfigError on an impossible value."""
        base = cls(mode=mode)
        # The papers as printed; docs/concepts/scheduling.md explains each departure.
        if mode == "paper":
            base = replace(
                base,
                rho_max=0.4,
                rho_min=0.0,
                yield_only_to_shorts=False,
                subtract_times=True,
                quantum=0.0,
                long_iterations=0.0,
                least_gain=0.0,
                useful_share=1.0,
                stretch=0.0,
                min_chunk=0,
                t_target_s=0.020,
                newcomer_wait_s=0.0,
            )
        return replace(base, **fields)
