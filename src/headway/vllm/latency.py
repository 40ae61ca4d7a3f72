"""Initial latency model of vLLM's steps: a stored profile, else a roofline of the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.perf.hardware import ACCELERATORS, AcceleratorSpec, ModelShape, from_hf_config
from headway.perf.hardware import model as named_model
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table import MachineRates, TableLatency, TableSource, default_path, load, roofline
from headway.policy.hosted.settings import TRUST_PROFILE, VllmSettings

_FLOPS_SHARE, _BANDWIDTH_SHARE = 0.5, 0.8
"""Assumed shares of an accelerator's peak rates (data sheet)."""
_PROBES, _LONGEST_PROBE_S = 40, 2.0
"""Tries of each work that a processor is timed with, and seconds after which it ends."""
CPU_ATTENTION_ROWS = 128
"""Of vLLM's kernel for processors: chunks of 8 to 96 tokens over the same history take equally long (measured by
`headway profile --vllm`, vLLM 0.32, float32, AVX-512)."""
_TRUST_ROOFLINE = 0.3
"""Weight of a roofline against measurements, in steps (`CorrectedLatency.confidence`)."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the roofline: one engine's model and device."""

    hf_config: Mapping[str, Any]
    dtype_bytes: int
    """Bytes of an element of weights and KV."""
    device_name: str
    """As its driver calls it, or "cpu"."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    fingerprint: str = ""
    """Key of a stored profile (`headway profile --vllm`)."""


def latency_model(settings: VllmSettings, facts: EngineFacts) -> tuple[LatencyModel, str]:
    """(a model that corrects itself, where it starts from). Raises ConfigError for a profile that cannot be read."""
    if settings.profile is not None:
        source = load(settings.profile, None)
        return CorrectedLatency(TableLatency(source), TRUST_PROFILE), f"profile {settings.profile}"
    stored = _stored(facts.fingerprint)
    if stored is not None:
        return CorrectedLatency(TableLatency(stored), TRUST_PROFILE), f"a stored profile, {stored.provenance}"
    shape, origin = model_shape(facts)
    rates = machine_rates(facts)
    why = f"no profile is stored for {facts.fingerprint}" if facts.fingerprint else "no profile is known"
    return CorrectedLatency(roofline(shape, rates), _TRUST_ROOFLINE), f"roofline of {rates.name}, {origin}: {why}"


def _stored(fingerprint: str) -> TableSource | None:
    """Return the profile that `headway profile --vllm` stored for this engine; None: there is none to read."""
    path = default_path(fingerprint)
    try:
        return load(path, fingerprint) if fingerprint and path.is_file() else None
    except ConfigError:
        return None


def model_shape(facts: EngineFacts) -> tuple[ModelShape, str]:
    """(the shape of one pipeline stage, in words). Where the config is not that of a Llama-like decoder, an 8B one."""
    try:
        shape, origin = from_hf_config(facts.hf_config), "shape of the checkpoint"
    except (ConfigError, TypeError, ValueError, ZeroDivisionError) as error:
        shape, origin = named_model("llama-3-8b"), f"shape of llama-3-8b, since the checkpoint's is unknown ({error})"
    layers = max(1, round(shape.layers / facts.pipeline_parallel))
    return msgspec.structs.replace(shape, layers=layers, dtype_bytes=facts.dtype_bytes), origin


def machine_rates(facts: EngineFacts) -> MachineRates:
    """Of one pipeline stage: tensor-parallel ranks share the work evenly, and their exchange is left to learning."""
    if facts.device_name == "cpu":
        return _probe_cpu(facts.tensor_parallel)
    spec = _accelerator(facts.device_name)
    ranks = facts.tensor_parallel
    return MachineRates(
        linear_flops=spec.flops * _FLOPS_SHARE * ranks,
        attention_flops=spec.flops * _FLOPS_SHARE * 0.7 * ranks,
        bandwidth=spec.bandwidth * _BANDWIDTH_SHARE * ranks,
        fixed_s=3e-3,
        per_decode_s=0.0,
        name=f"{facts.device_name} as {spec.name}",
    )


def _accelerator(device_name: str) -> AcceleratorSpec:
    """The preset whose chip the device's name has; an H100's where none does."""
    lowered = device_name.lower()
    for name, spec in ACCELERATORS.items():
        if name.split("-")[0] in lowered:
            return spec
    return ACCELERATORS["h100-80gb"]


def _probe_cpu(ranks: int) -> MachineRates:
    """Rates of this processor from a product and a copy that take some milliseconds at the most, at their best."""
    a, b = np.ones((64, 1024), np.float32), np.ones((1024, 1024), np.float32)
    flops = 2.0 * 64 * 1024 * 1024 / _best_s(lambda: a @ b)
    source = np.ones(8 << 20, np.float32)
    target = np.empty_like(source)
    bandwidth = 2.0 * source.nbytes / _best_s(lambda: np.copyto(target, source))
    return MachineRates(
        linear_flops=flops * 0.7 * ranks,
        attention_flops=flops * 0.3 * ranks,
        bandwidth=bandwidth * ranks,
        fixed_s=5e-3,
        per_decode_s=2e-5,
        attention_rows=CPU_ATTENTION_ROWS,
        name="this processor",
    )


def _best_s(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the shortest time of many tries, seconds.

    Servers that start together disturb each other: of a few tries all may take 40 times as long."""
    best, until_s = float("inf"), clock() + _LONGEST_PROBE_S
    for _ in range(_PROBES):
        began = clock()
        work()
        best = min(best, clock() - began)
        if clock() > until_s:
            break
    return max(best, 1e-6)
