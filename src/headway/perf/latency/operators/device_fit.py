"""The fits of all operator families of one die, read from a file that `headway profile fit` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from headway.core.errors import ConfigError
from headway.perf.latency.operators.collective import CollectiveFit
from headway.perf.latency.operators.decode import DecodeFit
from headway.perf.latency.operators.elementwise import ElementwiseFit
from headway.perf.latency.operators.linear import LinearFit
from headway.perf.latency.operators.prefill import PrefillFit

_T = TypeVar("_T")
SCHEMA = "headway.operators/3"
ATTENTION = ("vllm", "sglang", "frontier")
"""Kernel libraries in order of preference, where the attention of several was measured."""


class DeviceFit(msgspec.Struct, frozen=True, kw_only=True):
    """Fits of one die. A family without measurements is None, and `compile` derives it."""

    schema: str = SCHEMA
    device: str
    provenance: tuple[str, ...]
    linear: LinearFit | None
    elementwise: ElementwiseFit | None
    collectives: CollectiveFit | None
    prefill: PrefillFit | None
    decode: DecodeFit | None


def preferred_source(sources: Sequence[str]) -> str:
    """Return the preferred source: vLLM's kernels, SGLang's, then FlashInfer's in Frontier's profile; ties by name."""
    return min(sources, key=lambda s: (next((i for i, a in enumerate(ATTENTION) if s.startswith(a)), 9), s))


def decode(data: bytes, where: str) -> DeviceFit:
    """Parse a file's content. Raises ConfigError that names `where` when it is not an operator fit."""
    try:
        fit = msgspec.json.decode(data, type=DeviceFit)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where} holds no operator fit ({error}): make one with `headway profile fit`") from error
    if fit.schema != SCHEMA:
        raise ConfigError(f"{where} has schema {fit.schema!r}, not {SCHEMA!r}: make one with `headway profile fit`")
    return fit


def load(path: Path) -> DeviceFit:
    """Read the file of an operator fit. Raises ConfigError when it cannot be read."""
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the operator fit {path}: {error.strerror}") from error
