"""The file that `headway accel` reads: model, machine, precision, techniques, assumptions, a stage, a service.

Everything has a default: an empty file is Llama-3.1-8B on the TPUv6e-like machine. Errors name the field and what is
allowed there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import Field, create_model, field_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import Count, FileSection, Positive, Seconds, parsed_by, validated
from headway.core.parse import size, tokens
from headway.perf.hardware import ModelShape, from_config_file, model
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.scenario import ModelSection, PolicySection, WorkloadSection
from headway_research.accelerator.machine import (
    PRESETS,
    WORDS,
    AcceleratorAssumptions,
    IterationWork,
    MachineModel,
    OperandTypes,
    TechniqueSet,
    assumptions,
    machine,
)
from headway_research.accelerator.operators import OperatorSetting
from headway_research.accelerator.serving import sarathi

Tokens = Annotated[int, parsed_by(tokens, str), Field(ge=0)]
Size = Annotated[int, parsed_by(size, str), Field(ge=0)]


class MachineSection(FileSection):
    """A preset, and what differs from it. Sizes as 512MiB or 1G (powers of 1024)."""

    preset: str = Field(default="tpuv6e-like", description="headway_research.accelerator.machine")
    rows: Count | None = Field(default=None, description="rows of a systolic array")
    columns: Count | None = Field(default=None, description="its columns")
    arrays: Count | None = Field(default=None, description="how many")
    vector_lanes: Count | None = Field(default=None, description="multiply-accumulates a cycle of the vector unit")
    clock_ghz: Positive | None = Field(default=None, description="of arrays and vector unit")
    compute_buffer: Size | None = Field(default=None, description="on-chip memory for operands")
    prefetch_buffer: Size | None = Field(default=None, description="on-chip memory for prefetched KV")
    hbm_gbps: Positive | None = Field(default=None, description="HBM bandwidth, 10^9 bytes a second")
    hbm_capacity: Size | None = Field(default=None, description="HBM")


class PrecisionSection(FileSection):
    """fp32, fp16, bf16, fp8, int8 or int4. Arithmetic keeps its FP16 rate."""

    weights: str = "fp16"
    activations: str = "fp16"
    kv: str = "fp16"


class TechniquesSection(FileSection):
    flash_attention: bool = Field(default=True, description="scores stay on chip")
    fusion: str = Field(default="auto", description="auto: activations stay on chip where they fit; off: never")
    double_buffering: bool = Field(default=True, description="the next tile loads while this one is computed")


def _assumptions_section() -> type[FileSection]:
    given: dict[str, Any] = {
        name: (f"{AcceleratorAssumptions.__annotations__[name]} | None", Field(None, description=words))
        for name, words in WORDS.items()
    }
    return create_model(
        "AssumptionsSection", __base__=FileSection, __doc__="A preset, and what differs from it.",
        __module__="headway_research.accelerator.machine",
        preset=(str, Field("default", description=" or ".join(PRESETS))), **given,
    )  # fmt: skip


AssumptionsSection: Any = _assumptions_section()


class StageSection(FileSection):
    """One iteration. Tokens as 65536 or 64K."""

    prefill_tokens: Tokens = Field(default=1024, description="the chunk")
    prefill_past: Tokens = Field(default=0, description="cached tokens that the chunk attends to")
    decodes: Annotated[int, Field(ge=0)] = Field(default=32, description="requests that decode beside it")
    kv_tokens: Tokens = Field(default=65536, description="KV that they read together")


class LimitsSection(FileSection):
    """What must hold at the percentile. tbt_s null: the paper's rule, 32 decodes over 4K tokens each, alone."""

    tbt_s: Seconds | None = None
    delay_s: Seconds = 1.0
    percentile: Annotated[float, Field(gt=0, le=100)] = 99.0


class ServeSection(FileSection):
    """Requests on the accelerator. policy: settings of the scheduler in place of Sarathi-Serve's."""

    chunk: Count = Field(default=512, description="tokens of an iteration, decodes included")
    max_num_seqs: Count = Field(default=128, description="requests at once")
    kv_tokens: Tokens | None = Field(default=None, description="tokens of KV; null: what HBM holds beside the weights")
    policy: PolicySection = PolicySection()
    limits: LimitsSection = LimitsSection()
    workload: WorkloadSection = WorkloadSection(preset="sharegpt-like")
    requests: Count = Field(default=1000, description="how many, unless the workload says")
    seed: int = 0


class AccelFile(FileSection):
    """One study."""

    name: str = ""
    model: str | ModelSection = Field(
        default="llama-3.1-8b", description="a name, a config.json (or its folder), or a shape"
    )
    machine: MachineSection = MachineSection()
    precision: PrecisionSection = PrecisionSection()
    techniques: TechniquesSection = TechniquesSection()
    assumptions: AssumptionsSection = AssumptionsSection()
    stage: StageSection = StageSection()
    serve: ServeSection = ServeSection()

    @field_validator("machine", "assumptions", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value


@dataclass(frozen=True)
class AcceleratorStudy:
    """A validated file and the setting that it describes."""

    file: AccelFile
    setting: OperatorSetting

    @property
    def work(self) -> IterationWork:
        """The iteration of the file's `stage`."""
        return IterationWork(**self.file.stage.model_dump())

    def to_json(self) -> dict[str, Any]:
        """Return every assumption and number that results depend on."""
        parts = {"assumed": "assumptions"}
        setting = {parts.get(name, name): msgspec.to_builtins(part) for name, part in self.setting._asdict().items()}
        return {"model": self.file.model if isinstance(self.file.model, str) else "given", **setting}


def read_study(data: dict[str, Any], where: str = "file", folder: Path = Path()) -> AcceleratorStudy:
    """Validate a file's data and compile it to a study.

    where: the file's name in errors; folder: for relative paths of models, looked up there first. Raises ConfigError
    that names the field.
    """
    file = validated(AccelFile, data, where)
    try:
        setting = OperatorSetting(
            shape=_shape(file.model, folder),
            machine=_machine(file.machine),
            precision=OperandTypes(**file.precision.model_dump()),
            assumed=assumptions(**file.assumptions.model_dump(exclude_unset=True)),
            techniques=TechniqueSet(**file.techniques.model_dump()),
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return AcceleratorStudy(file, setting)


def scheduler_of(serve: ServeSection) -> SchedulerConfig:
    """Return Sarathi-Serve's scheduler configuration, overridden by the file's `serve.policy`. Raises ConfigError."""
    given: dict[str, Any] = serve.policy.model_dump(exclude_none=True)
    mode, base = given.pop("mode", "default"), sarathi(serve.chunk, serve.max_num_seqs)
    try:
        return SchedulerConfig.named(mode, **{**{f.name: getattr(base, f.name) for f in fields(base)}, **given})
    except ConfigError as error:
        raise ConfigError(f"serve.policy: {error}") from None


def _shape(given: str | ModelSection, folder: Path) -> ModelShape:
    """Return the model's sizes from a section, a config.json or its folder, or a known name. Raises ConfigError."""
    if isinstance(given, ModelSection):
        return ModelShape(**given.model_dump())
    # A file wins over a known name; `folder` is the study file's.
    for path in (folder / given, Path(given)):
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            return from_config_file(file)
    try:
        return model(given)
    except ConfigError as error:
        raise ConfigError(f"model: {error}, and no such file") from None


def _machine(section: MachineSection) -> MachineModel:
    """Return the preset's machine with the section's changes. Raises ConfigError."""
    # Fields of the file and their `MachineModel` fields, with the factor to SI units.
    names = {
        "compute_buffer": ("compute_bytes", 1),
        "prefetch_buffer": ("prefetch_bytes", 1),
        "clock_ghz": ("clock_hz", 1e9),
        "hbm_gbps": ("bandwidth", 1e9),
        "hbm_capacity": ("capacity", 1),
    }
    given = section.model_dump(exclude_none=True)
    try:
        base = machine(given.pop("preset", "tpuv6e-like"))
    except ConfigError as error:
        raise ConfigError(f"machine.preset: {error}") from None
    changes = {names.get(k, (k, 1))[0]: v * names.get(k, (k, 1))[1] for k, v in given.items()}
    return base.with_(**changes) if changes else base
