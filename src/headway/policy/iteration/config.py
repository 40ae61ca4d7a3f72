"""Settings of a scheduler, with their `--help` texts and limits. What code can know is no setting."""

# ruff: noqa: RUF009 - `_f` is `dataclasses.field`

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

from headway.core.errors import ConfigError
from headway.policy.iteration.medha import PAPER_T_TARGET_S, MedhaConfig, Mode
from headway.policy.iteration.ordering import LADDER, make_policy

PipelineSchedule = Literal["stream", "microbatch"]


def _f(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


FOLLOWS_FROM_LAYOUT: Final = frozenset(("stages", "kv_parallel", "kv_shard_tokens"))
"""Fields of `SchedulerConfig` that are no settings: they follow from the model and how it is spread."""

MIN_CHUNK: Final = 8
"""Fewer tokens of a prompt are not worth the iteration."""
LONG_TOKENS: Final = 8192
"""Prompts above this are counted as long in reports and metrics; no decision of the default depends on it."""
DEADLINE_BASE_S: Final = 1.0
DEADLINE_FACTOR: Final = 5.0
"""A first token without an SLO is due after max(base, factor × its prefill alone), as Medha's and others' evaluations
take it: a short wait is no harm, and a long prompt's reader expects a long one."""


class ChunkingRule(NamedTuple):
    """The setting `chunking`: how many tokens of a prompt an iteration computes (`fill.IterationFill.size`)."""

    kind: Literal["adaptive", "static", "whole"]
    """adaptive: the largest chunk that keeps the iteration within its time (Medha §3.2, Algorithm 2), large at first,
    smaller as the cache grows. static: a budget of tokens an iteration, decodes included (Sarathi-Serve's chunked
    prefill). whole: all of the prompt at once, as engines did before; of several only as many as the limit holds."""
    most: int | None = None
    """Tokens of an iteration; `static` only."""

    @property
    def timed(self) -> bool:
        """Whether chunks are sized by the time of the iteration."""
        return self.kind == "adaptive"

    @classmethod
    def read(cls, text: str) -> ChunkingRule:
        """Read `adaptive`, `whole` or `static:N`; raises ConfigError otherwise."""
        kind, _, tokens = text.partition(":")
        if kind == "static" and tokens.isdigit() and int(tokens) > 0:
            return cls("static", int(tokens))
        if text in ("adaptive", "whole"):
            return cls(text)  # type: ignore[arg-type]
        raise ConfigError(
            f"unknown chunking {text!r}: choose adaptive, whole, or static:N with N tokens, e.g. static:512"
        )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Settings of one instance's scheduler. Raises ConfigError on an impossible value."""

    policy: str = _f(
        LADDER, "order of waiting prefills: ladder, fcfs, edf, lrs, srpt, lars, or a class by its path, module.Class"
    )
    medha: MedhaConfig | None = _f(None, "Medha's rules for long prompts; null: with policy lars only")
    chunking: str = _f("adaptive", "tokens of a prompt per iteration: adaptive (by time), static:N (tokens), whole")
    t_target_s: float | None = _f(
        None,
        "longest gap between tokens of running requests, seconds; if set, no iteration with them is planned longer; "
        "default: 55 ms, or what an efficient chunk takes on this machine, up to 200 ms",
    )
    min_chunk: int = _f(MIN_CHUNK, "smallest chunk of a prompt that is worth an iteration, tokens")
    max_num_seqs: int = _f(256, "requests that hold KV at the same time, in each KV group")
    max_num_batched_tokens: int = _f(8192, "tokens of one iteration (a whole prompt may exceed it, alone)")
    stages: int = _f(1, "pipeline stages: batches in flight")
    kv_parallel: int = _f(1, "KV groups: replicas that each hold a shard of a long request's cache")
    kv_shard_tokens: int | None = _f(None, "tokens a KV group holds of one request; default: what t_target_s allows")
    pipeline_schedule: PipelineSchedule = _f("stream", "stream: a prompt's next chunk enters when stage 0 frees (SPP)")

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {rule}, not {getattr(self, name)!r}")

        # Both raise ConfigError for an unknown name.
        make_policy(self.policy)
        ChunkingRule.read(self.chunking)
        need(self.medha is None or self.policy != LADDER, "medha", "left out with policy ladder")
        need(self.t_target_s is None or self.t_target_s > 0, "t_target_s", "above 0")
        need(self.min_chunk >= 0, "min_chunk", "0 or more")
        need(self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        need(self.max_num_batched_tokens >= 1, "max_num_batched_tokens", "at least 1")
        need(self.stages >= 1, "stages", "at least 1")
        need(self.kv_parallel >= 1, "kv_parallel", "at least 1")
        need(self.kv_shard_tokens is None or self.kv_shard_tokens >= 1, "kv_shard_tokens", "at least 1")

    @property
    def medha_rules(self) -> MedhaConfig | None:
        """Medha's rules, where they hold."""
        return MedhaConfig(exact_target=False) if self.medha is None and self.policy == "lars" else self.medha

    @property
    def mode(self) -> Mode:
        """ "paper": Medha's scheduler as printed."""
        return "paper" if self.literal else "default"

    @property
    def literal(self) -> bool:
        """Whether Medha's rules hold as printed."""
        return self.medha is not None and self.medha.literal

    @property
    def exact_target(self) -> bool:
        """Whether iterations take `t_target_s`, no less and no more."""
        rules = self.medha
        return self.t_target_s is not None and rules is not None and (rules.exact_target or rules.literal)

    @property
    def leaves_headroom(self) -> bool:
        """Whether large requests leave KV free for small ones: not in the plain orders, which are baselines."""
        return self.policy in (LADDER, "lars")

    @property
    def gap_stages(self) -> int:
        """Stage times that the gap between two tokens of a request may take. A token that leaves the last of several
        stages may find the first one busy for one more; Medha §4.2 counts the stages only (mode `paper`)."""
        return self.stages if self.stages == 1 or self.literal else self.stages + 1

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> SchedulerConfig:
        """Return settings as `dataclasses.asdict` gives them. Raises ConfigError, and TypeError for other names."""
        medha = fields.get("medha")
        return cls(**{**fields, "medha": MedhaConfig(**medha) if isinstance(medha, Mapping) else medha})

    @classmethod
    def named(cls, mode: Mode, **fields: Any) -> SchedulerConfig:
        """Return the settings of a mode with `fields` on top: "paper" is Medha's scheduler as printed.

        Raises ConfigError on an impossible value."""
        if mode not in ("default", "paper"):
            raise ConfigError(f"mode must be 'default' or 'paper', not {mode!r}")
        if mode == "default":
            return cls.of_fields(fields)
        given = cls.of_fields({"policy": "lars", "t_target_s": PAPER_T_TARGET_S, "min_chunk": 0} | fields)
        # Sharing of iterations goes with Medha's own order; under another one it is asked for by name.
        medha = given.medha or MedhaConfig(space_sharing=given.policy == "lars")
        return replace(given, medha=replace(medha, mode="paper"))
