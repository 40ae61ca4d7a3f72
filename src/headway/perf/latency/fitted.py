"""Latency models fitted to profiles of GPUs that ship with the package, and the error band of a prediction.

`fitted("a100", "llama-3-8b", Layout(tp=8, stages=2), stage=1)`.

Fitted from public operator profiles (sources and licences: `data/README.md`). Devices whose die was profiled (A100,
H100 and their A800 and H800 variants) are `measured` or `fitted`; any other is `derived`: the nearest profiled die
scaled by data sheets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from math import inf, log2
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.perf.hardware import AcceleratorSpec, ModelShape, ParallelLayout, accelerator, model_name
from headway.perf.hardware import model as named_model
from headway.perf.latency import device_fit
from headway.perf.latency.base import BatchLoad, LatencyModel
from headway.perf.latency.device_fit import DERIVED_BANDS, DeviceFit, EngineAssumptions, compile_stage
from headway.perf.latency.table import ServingOverhead, TableLatency, TableSource

_STAND_IN = {"a100-40gb": "a100-80gb"}
"""Nearest profiled die of devices without profiles; any other device scales the H100."""


FRONT = ServingOverhead(token_s=16e-6)
"""What a server of vLLM adds in front of the GPU by default: the API server reads and tokenises a prompt, and hands it
to the engine. Fitted by `python -m benchmarks.yardsticks --fit` on two hosts, of which either alone is within 35%. Your
own server's is in a profile (`latency.front`)."""


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
    return shipped_fit(die if die in shipped() else _STAND_IN.get(die, "h100-80gb"))


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


# Error bars of predictions, by how far a query lies from the measurements behind it.
#
# A second query beside the prediction: `error_band(model, load)` for an iteration, `prefill_band(model, tokens)` for a
# lone prompt. Neither is on the simulator's hot path. A band's share holds nine of ten held-out times, by |predicted /
# measured - 1|: of sizes left out (`measured`), of models or head counts left out (`fitted`), of a device left out
# (`derived`), and of sizes beyond those fitted, by octaves. `python -m benchmarks.latency_fit` measures each anew and
# prints how many held-out rows the bands hold. They were set from those rows. With two dies in the profiles, `derived`
# is tested on the way back only (`device_fit.DeviceScaling`).

INSIDE_BANDS = {
    "linear": {"measured": 0.04, "fitted": 0.12},
    "linear a100-80gb": {"measured": 0.04, "fitted": 0.16},
    "linear l40s-48gb": {"measured": 0.04, "fitted": 0.17},
    "elementwise": {"measured": 0.11, "fitted": 0.15},
    "prefill": {"measured": 0.08, "fitted": 0.11},
    "decode": {"measured": 0.12, "fitted": 0.08},
    "decode a100-80gb": {"measured": 0.13, "fitted": 0.19},
    "decode b200-180gb": {"measured": 0.17, "fitted": 0.09},
    "decode l40s-48gb": {"measured": 0.40, "fitted": 0.14},
    "collectives": {"measured": 0.08},
}
"""Within the measured sizes, by operator family (and die, where it differs from the others) and origin: the P90 of
held-out rows. Elementwise operators: `measured` are widths that other models' profiles have. An L40S's sizes: between a
history in its cache and one beyond, time jumps threefold."""


def inside_band(family: str, origin: str, die: str) -> float:
    """Return the share within the measured sizes of one die."""
    return INSIDE_BANDS.get(f"{family} {die}", INSIDE_BANDS[family])[origin]


BEYOND_BANDS = {
    "rows": (0.05, 0.09, 0.12),
    "chunk": (0.24, 0.45, 0.71),
    "history": (0.07, 0.13, 0.30),
    "decode history": (0.10, 0.10, 0.15, 0.20),
    "decode batch": (0.43, 0.66, 0.79),
}
"""Beyond the measured sizes, one entry an octave: the P90 of rows so far beyond those fitted. Continued by the last
step where nothing was tested, so that one million tokens on 12,416 measured ones have a wide band."""


class ErrorBand(msgspec.Struct, frozen=True):
    """A predicted time with its P90 band."""

    seconds: float
    """The prediction."""
    share: float
    """Nine of ten held-out predictions so far from their data were off by less: |predicted / measured - 1|."""
    extrapolated: tuple[str, ...] = ()
    """Sizes outside what was measured: `rows`, `chunk`, `history`, `decode history`, `decode batch`."""
    derived: bool = False
    """Whether a term comes from another device's profile or from data sheets."""

    @property
    def high_s(self) -> float:
        """Greatest time in the band, in seconds; infinite where the prediction could be any share too low."""
        return self.seconds / (1.0 - self.share) if self.share < 1.0 else inf

    def words(self) -> str:
        """Return the band to print behind a figure, such as `± 14%` or `± 86%, extrapolated (history)`.

        From 100% on `high_s` is infinite and a difference would be negative: the least time is named alone."""
        unbounded = round(self.share, 2) >= 1
        text = f"at least 1/{1 + self.share:.1f} of it, no upper bound" if unbounded else f"± {self.share:.0%}"
        if self.extrapolated:
            text += f", extrapolated ({', '.join(self.extrapolated)})"
        return f"{text}, derived" if self.derived else text


def error_band(model: LatencyModel, load: BatchLoad) -> ErrorBand | None:
    """Return the band of one iteration; None for a model that no table lies under.

    The terms' errors are added as if they all had one sign, so the band of a sum is rather too wide."""
    source = table_source(model)
    if source is None:
        return None
    chunk = load.tokens - load.decodes
    longest = load.decode_kv // load.decodes if load.decodes else 0
    decode_s = model.decode_s(load.decodes, load.decode_kv) if load.decodes else 0.0
    terms = (
        (model.rows_s(load.tokens), *_rows_share(source, load.tokens)),
        (load.chunk_s, *_chunk_share(source, chunk, load.chunk_past)),
        (decode_s, *_decode_share(source, load.decodes, longest)),
    )
    seconds = sum(s for s, _, _ in terms)
    share = sum(s * share for s, share, _ in terms) / seconds if seconds else 0.0
    names = tuple(name for s, _, beyond in terms if s > 0 for name in beyond)
    return ErrorBand(seconds, share, names, _derived(source))


def prefill_band(model: LatencyModel, tokens: int) -> ErrorBand | None:
    """Return the band of one stage's time for a lone prompt of `tokens` in chunks of 2,048; None as in `error_band`.

    Sampled at 32 histories; a schedule with other chunks takes another time, and its share is nearly this one."""
    chunk = max(1, min(2048, tokens))
    steps = max(1, tokens // chunk)
    # Middles of equal parts: the mean over histories, times how many chunks there are.
    at = (np.arange(min(32, steps)) + 0.5) / min(32, steps) * (tokens - chunk)
    found = [
        error_band(model, BatchLoad().with_chunk(chunk, model.attention_s(int(past), chunk), int(past))) for past in at
    ]
    bands = [band for band in found if band is not None]
    if not bands:
        return None
    seconds = sum(band.seconds for band in bands)
    share = sum(band.seconds * band.share for band in bands) / seconds if seconds else 0.0
    names = tuple(dict.fromkeys(name for band in bands for name in band.extrapolated))
    return ErrorBand(seconds / len(bands) * tokens / chunk, share, names, bands[0].derived)


def table_source(model: LatencyModel) -> TableSource | None:
    """Return the table under a model: its own, or that of the model it corrects; None where there is neither."""
    inner: Any = model
    while inner is not None:
        source = getattr(inner, "source", None)
        if isinstance(source, TableSource):
            return source
        inner = getattr(inner, "base", None)
    return None


def _inside(source: TableSource, family: str, knots: Sequence[tuple[float, float]]) -> float:
    """Return the share within the measured sizes.

    A table measured as a whole has no families: each of its knots is left out and read off its neighbours."""
    origins = source.details.get("families")
    if origins is None:
        if _derived(source):
            return DERIVED_BANDS[family]
        # Too few knots to leave one out: as for other shapes of a profile.
        return left_out_share(knots) if len(knots) > 2 else INSIDE_BANDS[family]["fitted"]
    origin = str(origins.get(family, source.status)).split(":")[0]
    if origin == "derived":
        return max(DERIVED_BANDS[family], *INSIDE_BANDS[family].values())
    return inside_band(family, origin, accelerator(source.fingerprint.split("|")[1]).kernels)


def _derived(source: TableSource) -> bool:
    """Return whether a term is another device's, or all are a roofline's: a table without any measured history."""
    return source.status == "derived" or not (source.validated_past or source.details.get("families"))


def left_out_share(knots: Sequence[tuple[float, float]]) -> float:
    """Return the P90 of |interpolated / measured - 1| over knots (size, seconds), each left out; 0 below three."""
    if len(knots) < 3:
        return 0.0
    x, y = np.array(knots, dtype=np.float64).T
    weight = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    guess = y[:-2] + weight * (y[2:] - y[:-2])
    good = y[1:-1] > 0
    return float(np.quantile(np.abs(guess[good] / y[1:-1][good] - 1.0), 0.9)) if good.any() else 0.0


def beyond_share(name: str, size: int, top: int) -> float:
    """Return the share of a size beyond the greatest measured one, interpolated in octaves; 0 within."""
    if size <= top or top <= 0:
        return 0.0
    shares, octaves = BEYOND_BANDS[name], log2(size / top)
    steps = (0.0, *shares)
    if octaves >= len(shares):
        return steps[-1] + (octaves - len(shares)) * (steps[-1] - steps[-2])
    return float(np.interp(octaves, range(len(steps)), steps))


def _with_distance(inside: float, sizes: dict[str, tuple[int, int]]) -> tuple[float, list[str]]:
    """Return the share and the names of the sizes beyond what was measured; sizes: name to (asked, measured)."""
    names = [name for name, (size, top) in sizes.items() if 0 < top < size]
    return max([inside, *(beyond_share(name, *sizes[name]) for name in names)]), names


def _top(source: TableSource, key: str, otherwise: int) -> int:
    return int(source.details.get("validated", {}).get(key, otherwise))


def _rows_share(source: TableSource, rows: int) -> tuple[float, list[str]]:
    knots = source.tokens[1:]
    # Products and elementwise operators by the worse of the two: the table holds their sum only.
    inside = max(_inside(source, family, knots) for family in ("linear", "elementwise"))
    part = float(source.details.get("collective_share", 0.0))
    if part:
        # All-reduces are off by their own share of the time, at the row count where they weigh most.
        inside = max(inside, part * _inside(source, "collectives", knots) + (1.0 - part) * inside)
    return _with_distance(inside, {"rows": (rows, _top(source, "rows", int(knots[-1][0])))})


def _chunk_share(source: TableSource, chunk: int, past: int) -> tuple[float, list[str]]:
    inside = _inside(source, "prefill", [(c, a) for c, a, _ in source.chunks[1:]])
    history = _top(source, "chunk_past", source.validated_past)
    sizes = {"chunk": (chunk, _top(source, "chunk", int(source.chunks[-1][0]))), "history": (past, history)}
    return _with_distance(inside, sizes)


def _decode_share(source: TableSource, decodes: int, past: int) -> tuple[float, list[str]]:
    grid = source.decode_grid
    # The row of most requests shows how evenly the grid was measured; a line through few points has no knots.
    knots = list(zip(grid.past, grid.seconds[-1], strict=True)) if grid is not None else []
    inside = _inside(source, "decode", knots)
    # A table that was measured as a whole ends at its grid's last row.
    most = int(grid.counts[-1]) if grid is not None and "families" not in source.details else 0
    sizes = {
        "decode history": (past, _top(source, "decode_past", source.validated_past)),
        "decode batch": (decodes, _top(source, "decode_batch", most)),
    }
    return _with_distance(inside, sizes)
