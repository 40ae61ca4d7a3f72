"""All operator families of one accelerator's die, fitted, in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from headway.core.errors import ConfigError
from headway.perf.hardware.accelerators import accelerator
from headway.perf.latency.operators.collective import CollectiveFit, fit_collectives
from headway.perf.latency.operators.decode import DecodeFit, fit_decode
from headway.perf.latency.operators.elementwise import ElementwiseFit, fit_elementwise
from headway.perf.latency.operators.linear import LinearFit, fit_linear
from headway.perf.latency.operators.prefill import PrefillFit, fit_prefill
from headway.perf.latency.operators.profiles import COLLECTIVE, DECODE, ELEMENTWISE, LINEAR, PREFILL, OperatorProfile

_T = TypeVar("_T")
SCHEMA = "headway.operators/2"
ATTENTION = ("vllm", "sglang", "frontier")
"""Whose attention kernels are taken where several libraries were measured."""


class DeviceFit(msgspec.Struct, frozen=True, kw_only=True):
    """A family without measurements is None; `compile` says what it derives in its place."""

    schema: str = SCHEMA
    device: str
    provenance: tuple[str, ...]
    linear: LinearFit | None
    elementwise: ElementwiseFit | None
    collectives: CollectiveFit | None
    prefill: PrefillFit | None
    decode: DecodeFit | None


def fit_device(
    device: str,
    profiles: Sequence[OperatorProfile],
    provenance: Sequence[str] = (),
    tolerance: float = 0.01,
    slim: bool = True,
) -> DeviceFit:
    """Fit every family that `profiles` cover for the die of `device`. `slim` keeps one attention library and the NVLink
    switch's collectives: what `compile` uses. ConfigError when nothing is about this device."""
    die = accelerator(device).kernels
    own = [p for p in profiles if accelerator(p.device).kernels == die and len(p)]
    if not own:
        found = sorted({p.device for p in profiles})
        raise ConfigError(f"no profile of {die} among those read; they are of {', '.join(found) or 'nothing'}")
    by = {family: [p for p in own if p.family == family] for family in (LINEAR, ELEMENTWISE, PREFILL, DECODE)}
    # An A800's links are slower than an A100's: collectives count for the very device only.
    collectives = [p for p in own if p.family == COLLECTIVE and p.device == die]
    prefill = fit_prefill(die, by[PREFILL], tolerance / 2) if by[PREFILL] else None
    decode = fit_decode(die, by[DECODE]) if by[DECODE] else None
    if slim:
        collectives = [p for p in collectives if "pairwise" not in p.source and p.source != "vllm_eager"]
        collectives = [p for p in collectives if p.op in ("all_reduce", "send_recv")]
        if prefill is not None:
            prefill = msgspec.structs.replace(prefill, own=_preferred(prefill.own))
        if decode is not None:
            decode = msgspec.structs.replace(decode, grids=_preferred(decode.grids), tails=_preferred(decode.tails))
    return DeviceFit(
        device=die,
        provenance=tuple(provenance),
        linear=fit_linear(die, by[LINEAR], tolerance) if by[LINEAR] else None,
        elementwise=fit_elementwise(by[ELEMENTWISE], tolerance) if by[ELEMENTWISE] else None,
        collectives=fit_collectives(collectives, tolerance) if collectives else None,
        prefill=prefill if prefill is not None and prefill.own else None,
        decode=decode if decode is not None and decode.grids else None,
    )


def preferred_source(sources: Sequence[str]) -> str:
    """vLLM's kernels before SGLang's before FlashInfer's as Frontier ran them; by name among equals."""
    return min(sources, key=lambda s: (next((i for i, a in enumerate(ATTENTION) if s.startswith(a)), 9), s))


def _preferred(sources: dict[str, _T]) -> dict[str, _T]:
    if not sources:
        return sources
    best = preferred_source(list(sources))
    return {best: sources[best]}


def encode(fit: DeviceFit) -> bytes:
    """The file's bytes; the same fit gives the same bytes."""
    return msgspec.json.encode(fit) + b"\n"


def decode(data: bytes, where: str) -> DeviceFit:
    """ConfigError naming `where` when the bytes are no such file."""
    try:
        fit = msgspec.json.decode(data, type=DeviceFit)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{where} holds no operator fit ({error}): make one with `headway profile fit`") from error
    if fit.schema != SCHEMA:
        raise ConfigError(f"{where} has schema {fit.schema!r}, not {SCHEMA!r}: make one with `headway profile fit`")
    return fit


def load(path: Path) -> DeviceFit:
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the operator fit {path}: {error.strerror}") from error
