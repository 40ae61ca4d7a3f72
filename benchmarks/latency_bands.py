"""How many held-out rows the error bands of `perf.latency.fitted` hold, for `python -m benchmarks.latency_fit`.

Twice: with the bands that ship, which were set from these very rows, and with bands set from all groups but the one
tested, which is what a new model, head count, device or grid meets. Two dies have profiles, so a derived band is set
from one derivation and tested on the way back: that tests the rule, on kernels of two generations, and no third die.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from benchmarks import latency_fit as fit
from headway.perf.hardware import accelerator
from headway.perf.latency.device_fit import DERIVED_BANDS
from headway.perf.latency.fitted import BEYOND_BANDS, beyond_share, inside_band
from headway.perf.latency.operators import LAYERS, ring_all_reduce_ms
from headway_research.fit.operators import batched_rows, fit_batched_prefill
from headway_research.fit.readers import (  # type: ignore[attr-defined]
    COLLECTIVE,
    DECODE,
    ELEMENTWISE,
    LINEAR,
    PREFILL,
    Column,
    OperatorProfile,
)

Groups = dict[str, fit.Errors]
Coverage = tuple[str, float, Groups, Mapping[str, float]]
"""What is held out, the shipped band, errors by group, and by group the band that the others set (empty: the P90 of
their rows)."""
DERIVED_TOGETHER = ({LINEAR}, {ELEMENTWISE}, {PREFILL, DECODE})
"""Families with one derived band. Attention's kernels are rewritten between generations: how far that puts a derivation
off shows in the few pairs of die and kernel, of which the worst counts."""
FAMILIES = (LINEAR, ELEMENTWISE, PREFILL, DECODE)


def inside(
    pairs: Mapping[tuple[str, str, str], fit.Errors],
    models: Mapping[tuple[str, str], Mapping[str, fit.Errors]],
    heads: Mapping[str, fit.Errors],
    widths: Groups,
    shapes: Groups,
) -> Iterable[Coverage]:
    """Yield sizes, models, head counts and shapes of an engine's products left out, by die."""
    found: dict[tuple[str, str, str], Groups] = {}

    def add(what: str, family: str, origin: str, group: str, errors: fit.Errors) -> None:
        found.setdefault((f"{what}: {family}, {group.split()[0]}", family, origin), {})[group] = errors

    for (d, m, family), errors in pairs.items():
        if family != ELEMENTWISE:
            add("sizes left out", family, "measured", f"{d} {m}", errors)
    for group, errors in widths.items():
        add("models left out, widths of others", ELEMENTWISE, "measured", group, errors)
    for (d, m), row in models.items():
        for family in (LINEAR, ELEMENTWISE):
            if family in row:
                add("models left out", family, "fitted", f"{d} {m}", row[family])
    for name, errors in shapes.items():
        if not name.endswith(LAYERS):
            add("shapes left out", LINEAR, "fitted", name, errors)
    for name, errors in heads.items():
        add("head counts left out", name.split()[-1], "fitted", name, errors)
    for (name, family, origin), groups in found.items():
        die = accelerator(next(iter(groups)).split()[0]).kernels
        yield name, inside_band("collectives" if family == COLLECTIVE else family, origin, die), groups, {}


def devices(ratios: Mapping[tuple[str, str], fit.Errors]) -> Iterable[Coverage]:
    """Yield dies left out. ratios: predicted / measured by (direction, family), of `latency_fit.unseen_devices`."""
    for family in FAMILIES:
        own = {way: found for (way, of), found in ratios.items() if of == family}
        others = {way: derived_band(family, {key: r for key, r in ratios.items() if key[0] != way}) for way in own}
        errors = {way: np.abs(found - 1.0) for way, found in own.items()}
        yield f"devices left out: {family}", DERIVED_BANDS[family], errors, others


def derived_band(family: str, ratios: Mapping[tuple[str, str], fit.Errors]) -> float:
    """Return the band that derivations set for a family: the worst P90 error of its kind, by direction and family.

    A ratio counts as its inverse too: what one derivation takes for half as long, the way back takes for twice."""
    kind = next(kind for kind in DERIVED_TOGETHER if family in kind)
    return max(float(np.quantile(np.maximum(r, 1.0 / r) - 1.0, 0.9)) for (_, of), r in ratios.items() if of in kind)


def beyond(profiles: Sequence[OperatorProfile]) -> Iterable[Coverage]:
    """Yield the same of sizes beyond those fitted, by octaves."""
    found: dict[tuple[str, int], dict[str, list[fit.Errors]]] = {}

    def add(name: str, rows: OperatorProfile, column: str, tops: Sequence[int], predict: Predict) -> None:
        for top in tops:
            train, test = rows.where(rows.x[column] <= top), rows.where(rows.x[column] > top)
            if len(train) < 4 or not len(test):
                continue
            errors, octaves = fit.error(predict(train, test), test.ms), np.ceil(np.log2(test.x[column] / top))
            for k in np.unique(octaves):
                group = f"{rows.device} {rows.source} {rows.group.split('/')[0]}"
                found.setdefault((name, int(k)), {}).setdefault(group, []).append(errors[octaves == k])

    for p in profiles:
        grid = p.source != "frontier"
        if p.family == LINEAR and p.op != "gemm" and p.x["m"].max() > 8192:
            add("rows", p, "m", (4096, 8192), fit.by_linear)
        elif p.family == ELEMENTWISE and p.x["tokens"].max() > 8192:
            add("rows", p, "tokens", (4096, 8192), fit.by_elementwise)
        elif p.family == PREFILL and grid:
            add("chunk", fit.one_chunk_rows(p), "chunk", (2048, 4096), fit.by_prefill)
        elif p.family == PREFILL and p.x["past"].max() > 3000:
            add("history", fit.one_chunk_rows(p), "past", (1552, 3100, 6200), fit.by_prefill)
        elif p.family == DECODE and grid:
            add("decode history", p, "past", (4095, 8191, 16383, 32767), fit.by_decode)
            add("decode batch", p, "batch", (128, 256), fit.by_decode)
    for (name, octave), groups in sorted(found.items()):
        if octave <= len(BEYOND_BANDS[name]):
            band = beyond_share(name, 2**octave, 1)
            yield f"{name}, octave {octave} beyond", band, {g: np.concatenate(e) for g, e in groups.items()}, {}


def derived_rings(profiles: Sequence[OperatorProfile]) -> Iterable[Coverage]:
    """Yield the same of all-reduces that a link's data sheet gives, against vLLM's under CUDA graphs."""
    found: Groups = {}
    for p in (p for p in profiles if p.op == "all_reduce" and p.source == "vllm_graph"):
        link, ranks = accelerator(p.device).inside, p.x["workers"]
        found[p.device] = fit.error(ring_all_reduce_ms(link, p.x["bytes"], ranks), p.ms)
    yield "all-reduces by data sheet", DERIVED_BANDS["collectives"], found, {}


Predict = Callable[[OperatorProfile, OperatorProfile], Column]


def batched(profiles: Sequence[OperatorProfile]) -> Iterable[tuple[str, fit.Errors]]:
    """Yield errors of batches of prompts, each head count left out: as a sum of single ones, then as fitted."""
    for p in (p for p in profiles if p.family == PREFILL):
        parts: dict[str, list[fit.Errors]] = {}
        for rows, heads in fit.by_heads(p):
            test, alone = batched_rows(rows)
            here = (p.x["q_heads"] == heads[0]) & (p.x["kv_heads"] == heads[1])
            model = fit_batched_prefill([p.where(~here)])
            if model is None or not len(test):
                continue
            x = test.x
            guesses = {"sum": x["batch"] * alone, "fit": model.batch_ms(alone, x["batch"], x["chunk"], x["q_heads"])}
            for how, guess in guesses.items():
                errors = fit.error(guess, test.ms)
                parts.setdefault(f"{how}, all chunks", []).append(errors)
                parts.setdefault(f"{how}, chunks of 1,024 and more", []).append(errors[x["chunk"] >= 1024])
        for name in sorted(parts, reverse=True):
            yield f"{p.device} {p.source}: {name}", np.concatenate(parts[name])


def coverage(band: float, groups: Groups, by_others: Mapping[str, float]) -> tuple[int, float, float, float]:
    """Return (rows, P90 of all, share of rows within `band`, share within a band set without their own group).

    The last is NaN with a single group. by_others: see `Coverage`."""
    every = np.concatenate(list(groups.values()))
    within = []
    for name, errors in groups.items():
        others = [e for other, e in groups.items() if other != name]
        if others:
            within.append(errors <= (by_others.get(name) or np.quantile(np.concatenate(others), 0.9)))
    held = float(np.concatenate(within).mean()) if within else float("nan")
    return every.size, float(np.quantile(every, 0.9)), float((every <= band).mean()), held


def show(rows: Iterable[Coverage]) -> list[tuple[str, float, float]]:
    """Print the coverage table; returns (name, share within the shipped band, share within a band set by others)."""
    head = f"{'':<44}{'n':>7}{'P90 %':>8}{'band %':>8}{'within %':>10}{'by others %':>13}"
    print(f"\nHeld-out rows within the error bands (aimed at: 90%)\n{head}")
    found = []
    for name, band, groups, by_others in rows:
        if groups:
            n, p90, within, held = coverage(band, groups, by_others)
            found.append((name, within, held))
            print(f"{name:<44}{n:>7}{100 * p90:>8.1f}{100 * band:>8.0f}{100 * within:>10.1f}{100 * held:>13.1f}")
    return found
