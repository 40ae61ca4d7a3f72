"""Settings of the plug-in: `--additional-config '{"headway": {...}}'` on vLLM's command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from headway.core.errors import ConfigError
from headway.core.file_sections import AimMs, FileSection, validated
from headway.core.request import Slo
from headway.policy.iteration.config import LONG_TOKENS, MIN_CHUNK, SchedulerConfig

TRUST_PROFILE = 2.0
"""Weight of a measured profile against the steps that the engine measures, in steps (`CorrectedLatency`)."""


class ClassTargets(FileSection):
    """Latency targets of a class of requests."""

    ttft_ms: float | None = Field(None, gt=0, description="time to the first token, ms")
    tpot_ms: float | None = Field(None, gt=0, description="mean time per output token after the first, ms")


class VllmSettings(FileSection):
    """All fields are optional. Unknown names are refused."""

    t_target_ms: AimMs | None = Field(
        None, description="longest gap between tokens of running requests, ms; default: by the machine, 55 to 200"
    )
    policy: str = Field("ladder", description="order of waiting prefills: ladder, fcfs, edf, lrs, srpt or lars")
    profile: Path | None = Field(None, description="file of a measured latency profile (`headway profile --out`)")
    log: Path | None = Field(None, description="file for the log of each step's inputs and decision")
    classes: dict[Literal["short", "long"], ClassTargets] = Field(
        default_factory=dict,
        description=f"targets of requests that ask for none; long: prompts above {LONG_TOKENS:,} tokens, short: the "
        "others; a simulated request has its scenario's `slo`",
    )
    max_errors: int = Field(10, ge=1, description="policy errors after which the stock order is kept for good")

    def slo_of(self, asked: Slo, prompt_tokens: int) -> Slo:
        """Return what a request asks for, or its class's targets if it asks for nothing."""
        targets = self.classes.get("long" if prompt_tokens > LONG_TOKENS else "short")
        if targets is None or asked != Slo():
            return asked
        ttft, tpot = targets.ttft_ms, targets.tpot_ms
        return Slo(ttft_s=None if ttft is None else ttft / 1000, tbt_s=None if tpot is None else tpot / 1000)

    def scheduler_config(
        self, max_num_seqs: int, max_num_batched_tokens: int, least_chunk: int, stages: int
    ) -> SchedulerConfig:
        """Return the policy's own settings. `least_chunk`: tokens below which vLLM would round a chunk down to nothing.

        Raises ConfigError on an impossible combination.
        """
        return SchedulerConfig(
            policy=self.policy,
            t_target_s=None if self.t_target_ms is None else self.t_target_ms / 1000,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            min_chunk=max(MIN_CHUNK, least_chunk),
            stages=stages,
        )


def read_settings(additional_config: object) -> VllmSettings:
    """The settings in vLLM's `additional_config`. Raises ConfigError that names each wrong field."""
    given: Any = additional_config.get("headway", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(f'additional_config["headway"] must be an object, not {given!r}')
    return validated(VllmSettings, dict(given), 'additional_config["headway"]')
