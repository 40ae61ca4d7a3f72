"""Fits of all operator families of one accelerator's die, and the file that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from headway.core.errors import ConfigError
from headway.perf.hardware.accelerators import accelerator
from headway.perf.latency.operators.batched_prefill import fit_batched_prefill
from headway.perf.latency.operators.collective import CollectiveFit, fit_collectives
from headway.perf.latency.operators.decode import DecodeFit, fit_decode
from headway.perf.latency.operators.elementwise import ElementwiseFit, fit_elementwise
from headway.perf.latency.operators.linear import LinearFit, fit_linear
from headway.perf.latency.operators.prefill import PrefillFit, fit_prefill
from headway.perf.latency.operators.profiles import COLLECTIVE, DECODE, ELEMENTWISE, LINEAR, PREFILL, OperatorProfile

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


def fit_device(
    device: str,
    profiles: Sequence[OperatorProfile],
    provenance: Sequence[str] = (),
    tolerance: float = 0.01,
    slim: bool = True,
) -> DeviceFit:
    """Fit every family that `profiles` cover for the die of `device`. Raises ConfigError when none is of this die.

    slim: keep only what `compile` uses: one attention library, and collectives over the NVLink switch."""
    die = accelerator(device).kernels
    own = [p for p in profiles if accelerator(p.device).kernels == die and len(p)]
    if not own:
        found = sorted({p.device for p in profiles})
        raise ConfigError(f"no profile of {die} among those read; they are of {', '.join(found) or 'nothing'}")
    by = {family: [p for p in own if p.family == family] for family in (LINEAR, ELEMENTWISE, PREFILL, DECODE)}
    # An A800 shares the A100's die but has slower links: collectives are fitted from the die's own device only.
    collectives = [p for p in own if p.family == COLLECTIVE and p.device == die]
    prefill = fit_prefill(die, by[PREFILL], tolerance / 2) if by[PREFILL] else None
    if prefill is not None and prefill.own:
        library = preferred_source(list(prefill.own))
        batched = fit_batched_prefill([p for p in by[PREFILL] if p.source == library])
        prefill = msgspec.structs.replace(prefill, batched=batched)
    decode = fit_decode(die, by[DECODE]) if by[DECODE] else None
    # Drop what the preferred sources replace, so that shipped files stay small.
    if slim:
        collectives = [p for p in collectives if "pairwise" not in p.source and p.source != "vllm_eager"]
        collectives = [p for p in collectives if p.op in ("all_reduce", "send_recv")]
        if prefill is not None:
            prefill = msgspec.structs.replace(prefill, own=_preferred(prefill.own))
        if decode is not None:
            grids, tails, growth = _preferred(decode.grids), _preferred(decode.tails), _preferred(decode.growth)
            decode = msgspec.structs.replace(decode, grids=grids, tails=tails, growth=growth)
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
    """Return the preferred source: vLLM's kernels, SGLang's, then FlashInfer's in Frontier's profile; ties by name."""
    return min(sources, key=lambda s: (next((i for i, a in enumerate(ATTENTION) if s.startswith(a)), 9), s))


def _preferred(sources: dict[str, _T]) -> dict[str, _T]:
    if not sources:
        return sources
    best = preferred_source(list(sources))
    return {best: sources[best]}


def encode(fit: DeviceFit) -> bytes:
    """Return the fit's file content; equal fits give equal bytes."""
    return msgspec.json.encode(fit) + b"\n"


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
