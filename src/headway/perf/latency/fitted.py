"""Latency models that ship with Headway: `fitted("a100", "llama-3-8b", Layout(tp=8, stages=2), stage=1)`.

Fitted from public operator profiles (sources and licences: `data/README.md`). Devices whose die was profiled (A100,
H100 and their A800 and H800 variants) are `measured` or `fitted`; any other is `derived`: the nearest profiled die
scaled by data sheets.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from headway.core.errors import ConfigError
from headway.perf.hardware.accelerators import ACCELERATORS, AcceleratorSpec, accelerator
from headway.perf.hardware.models import model as named_model
from headway.perf.hardware.models import model_name
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.layout import ParallelLayout
from headway.perf.latency.operators import device_fit
from headway.perf.latency.operators.compile import EngineAssumptions, compile_stage
from headway.perf.latency.operators.device_fit import DeviceFit
from headway.perf.latency.table_latency import TableLatency, TableSource

# Nearest profiled die of devices without profiles; any other device scales the A100-80GB.
_STAND_IN = {"h200-141gb": "h100-80gb", "h20-96gb": "h100-80gb"}


def shipped() -> list[str]:
    """Return the names of the dies whose fits ship with the package."""
    folder = files("headway.perf.latency") / "data"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


@cache
def shipped_fit(die: str) -> DeviceFit:
    """Return the shipped fit of one die. Raises ConfigError, listing those that exist, for an unknown one."""
    if die not in shipped():
        raise ConfigError(f"no operator fit of {die} ships with Headway; there are: {', '.join(shipped())}")
    path = files("headway.perf.latency") / "data" / f"{die}.json"
    return device_fit.decode(path.read_bytes(), f"the shipped fit of {die}")


def fit_for(device: AcceleratorSpec) -> DeviceFit:
    """Return the fit to compile for `device`: its die's own, or that of the nearest profiled die (`derived`)."""
    die = device.kernels
    return shipped_fit(die if die in shipped() else _STAND_IN.get(die, "a100-80gb"))


def fitted_source(
    device: str | AcceleratorSpec,
    model: str | ModelShape,
    layout: ParallelLayout | None = None,
    stage: int = 0,
    *,
    fit: DeviceFit | Path | None = None,
    assumptions: EngineAssumptions | None = None,
) -> TableSource:
    """Return the table that `fitted` compiles, to be stored or inspected.

    fit: a file of `headway profile fit`, or a fit in memory, in place of the shipped one."""
    own = accelerator(device) if isinstance(device, str) else device
    shape = named_model(model) if isinstance(model, str) else model
    name = model_name(model) if isinstance(model, str) else f"{shape.layers}x{shape.hidden}"
    if isinstance(fit, Path):
        fit = device_fit.load(fit)
    return compile_stage(name, shape, own, layout or ParallelLayout(), stage, fit or fit_for(own), assumptions)


def fitted(
    device: str | AcceleratorSpec,
    model: str | ModelShape,
    layout: ParallelLayout | None = None,
    stage: int = 0,
    *,
    fit: DeviceFit | Path | None = None,
    assumptions: EngineAssumptions | None = None,
) -> TableLatency:
    """Return the latency model of one pipeline stage (counted from 0) of `model` on `device` in `layout`.

    Raises ConfigError with a list of known names for an unknown one. `.source.status` is "measured", "fitted" or
    "derived"; `.source.details` gives the same by operator family, and the sizes up to which it was validated."""
    return TableLatency(fitted_source(device, model, layout, stage, fit=fit, assumptions=assumptions))


__all__ = [
    "ACCELERATORS",
    "EngineAssumptions",
    "ParallelLayout",
    "fit_for",
    "fitted",
    "fitted_source",
    "shipped",
    "shipped_fit",
]
