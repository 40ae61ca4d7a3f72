"""Settings of the plug-in: `--additional-config '{"headway": {...}}'` on vLLM's command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from headway.core.errors import ConfigError
from headway.core.file_sections import FileSection, validated
from headway.policy.iteration.config import SchedulerConfig

TRUST_PROFILE = 2.0
"""Weight of a measured profile against the steps that the engine measures, in steps (`CorrectedLatency`)."""


class VllmSettings(FileSection):
    """All fields are optional. Unknown names are refused."""

    t_target_ms: float | None = Field(
        None, gt=0, description="longest gap between tokens of running requests, ms; default: by the machine, 55 to 200"
    )
    newcomer_wait_ms: float | None = Field(
        None, ge=0, description="longest step while nothing decodes, ms; default: by the machine and by arrivals"
    )
    policy: str = Field("lars", description="order of waiting prefills: fcfs, edf, lrs, srpt or lars")
    long_tokens: int = Field(8192, ge=1, description="prompts above this are long: at most one of them in a step")
    min_chunk: int = Field(8, ge=1, description="smallest chunk of a prompt that is worth a step, tokens")
    even_rows: bool | None = Field(
        None, description="cut prompts so that step sizes recur, 16 to the next power of two (default: on a CPU)"
    )
    least_gain: float = Field(3.0, ge=0, description="a step may take so many times the time of one token's step")
    useful_share: float = Field(
        0.99,
        gt=0,
        le=1,
        description="steps are no longer than those whose chunks reach this share of the best speed; 1: as t_target_ms",
    )
    stretch: float = Field(
        0.15, ge=0, description="share by which a step may exceed its aim to complete a short prompt"
    )
    rho_max: float = Field(0.7, ge=0, lt=1, description="largest share of a step that a long prefill yields to shorts")
    deadline_base_ms: float = Field(1000.0, ge=0, description="TTFT deadline without an SLO: at least this, ms")
    deadline_factor: float = Field(5.0, gt=0, description="the same: at least so many times the prefill's time alone")
    admission_age_s: float = Field(10.0, ge=0, description="a request that lacked KV so long keeps later ones out")
    profile: Path | None = Field(None, description="file of a measured latency profile (`headway profile --out`)")
    log: Path | None = Field(None, description="file for the log of each step's inputs and decision")
    max_errors: int = Field(10, ge=1, description="policy errors after which the stock order is kept for good")

    def scheduler_config(
        self, max_num_seqs: int, max_num_batched_tokens: int, least_chunk: int, stages: int, reserve_tokens: int
    ) -> SchedulerConfig:
        """The policy's own settings. `least_chunk`: tokens below which vLLM would round a chunk down to nothing.
        `reserve_tokens`: KV that is set aside beyond a prompt, for its first outputs.

        Raises ConfigError on an impossible combination.
        """
        return SchedulerConfig(
            policy=self.policy,
            t_target_s=None if self.t_target_ms is None else self.t_target_ms / 1000,
            newcomer_wait_s=None if self.newcomer_wait_ms is None else self.newcomer_wait_ms / 1000,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            least_gain=self.least_gain,
            useful_share=self.useful_share,
            stretch=self.stretch,
            min_chunk=max(self.min_chunk, least_chunk),
            even_rows=bool(self.even_rows),
            long_tokens=self.long_tokens,
            rho_max=self.rho_max,
            rho_min=min(0.2, self.rho_max),
            deadline_base_s=self.deadline_base_ms / 1000,
            deadline_factor=self.deadline_factor,
            admission_age_s=self.admission_age_s,
            reserve_tokens=reserve_tokens,
            stages=stages,
        )


def read_settings(additional_config: object) -> VllmSettings:
    """The settings in vLLM's `additional_config`. Raises ConfigError that names each wrong field."""
    given: Any = additional_config.get("headway", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ConfigError(f'additional_config["headway"] must be an object, not {given!r}')
    return validated(VllmSettings, dict(given), 'additional_config["headway"]')
