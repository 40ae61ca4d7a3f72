"""Errors of the latency fit on times that it has not seen: `python -m benchmarks.latency_fit [--profiles FOLDER]`.

Whole sizes are held out (all rows with a token count, chunk or history), never random rows, whose neighbours would
give them away. Prints mean and P90 of |predicted / measured - 1| in percent, by (device, model) pair and family; whole
iterations; models of which no shape was seen; sizes beyond those fitted; how many of these rows the error bands hold;
and Medha's own statements beside ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from headway.perf.hardware import ParallelLayout, accelerator
from headway.perf.latency.base import PrefillCache
from headway.perf.latency.device_fit import DeviceScaling, EngineAssumptions, preferred_source
from headway.perf.latency.fitted import fitted
from headway.perf.latency.operators import LAYERS
from headway_research.fit.operators import (
    fit_collectives,
    fit_decode,
    fit_device,
    fit_elementwise,
    fit_linear,
    fit_prefill,
)
from headway_research.fit.readers import (  # type: ignore[attr-defined]
    COLLECTIVE,
    DECODE,
    ELEMENTWISE,
    LINEAR,
    PREFILL,
    Column,
    OperatorProfile,
    read_all,
)

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT.parent / "shared" / "data" / "profiles"
FOLDS = 5
MEDHA_LENGTHS = (1700, 8192, 131072, 393216, 838861, 1_000_000)
SPLITS: tuple[Literal["never", "beyond", "always"], ...] = ("always", "beyond", "never")
Errors = npt.NDArray[np.float64]


def files(root: Path) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.name.endswith((".csv.gz", ".csv", ".parquet")))


def folds(values: Column) -> npt.NDArray[np.int64]:
    """A fold for every row, by its value: each fifth of the distinct values, the least and the greatest in none (-1),
    because predicting outside is extrapolation, reported apart."""
    distinct = np.unique(values)
    which = np.arange(distinct.size) % FOLDS
    which[[0, -1]] = -1
    return np.asarray(which[np.searchsorted(distinct, values)])


def error(predicted: Column, measured: Column) -> Errors:
    return np.abs(predicted / measured - 1.0)


def held_out(
    profile: OperatorProfile, size: str, predict: Callable[[OperatorProfile, OperatorProfile], Column]
) -> Errors:
    """Errors over all folds of one profile; `predict(train, test)`."""
    which = folds(profile.x[size])
    found = [np.zeros(0)]
    for fold in range(FOLDS):
        test = profile.where(which == fold)
        if len(test):
            found.append(error(predict(profile.where(which != fold), test), test.ms))
    return np.concatenate(found)


def by_linear(train: OperatorProfile, test: OperatorProfile) -> Column:
    fit = fit_linear(test.device, [train], trees=0)
    return fit.ms(test.x["m"], int(test.x["k"][0]), int(test.x["n"][0]))


def by_elementwise(train: OperatorProfile, test: OperatorProfile) -> Column:
    return fit_elementwise([train]).ms(test.op, test.x["tokens"], int(test.x["width"][0]))


def by_prefill(train: OperatorProfile, test: OperatorProfile) -> Column:
    fit = fit_prefill(accelerator(test.device).kernels, [train])
    out = np.zeros(len(test))
    for q, kv in np.unique(np.stack([test.x["q_heads"], test.x["kv_heads"]], axis=1), axis=0):
        rows = (test.x["q_heads"] == q) & (test.x["kv_heads"] == kv)
        heads, chunk, past = (int(q), int(kv)), test.x["chunk"][rows], test.x["past"][rows]
        own = fit.own_ms(chunk, heads, test.source)
        over = fit.prefix_ms(chunk, heads, test.source) + fit.slope_ms(chunk, heads, test.source) * past
        out[rows] = own + np.where(past > 0, over, 0.0)
    return out


def by_decode(train: OperatorProfile, test: OperatorProfile) -> Column:
    fit = fit_decode(accelerator(test.device).kernels, [train])
    out = np.zeros(len(test))
    for q, kv in np.unique(np.stack([test.x["q_heads"], test.x["kv_heads"]], axis=1), axis=0):
        rows = (test.x["q_heads"] == q) & (test.x["kv_heads"] == kv)
        out[rows] = fit.ms(test.x["batch"][rows], test.x["past"][rows], (int(q), int(kv)), test.source)
    return out


def by_collective(train: OperatorProfile, test: OperatorProfile) -> Column:
    fit = fit_collectives([train])
    out = np.zeros(len(test))
    for workers, across in np.unique(np.stack([test.x["workers"], test.x["across"]], axis=1), axis=0):
        rows = (test.x["workers"] == workers) & (test.x["across"] == across)
        out[rows] = fit.ms(test.op, test.x["bytes"][rows], int(workers), bool(across))
    return out


def one_chunk_rows(profile: OperatorProfile) -> OperatorProfile:
    """Single prompts only: a batch's chunks are summed by the scheduler."""
    return profile.where((profile.x["batch"] == 1) & (profile.x["chunk"] > 0))


def families(profiles: Sequence[OperatorProfile]) -> dict[tuple[str, str, str], Errors]:
    """(device, model or grid, family) → errors on held-out sizes."""
    found: dict[tuple[str, str, str], list[Errors]] = {}
    for p in profiles:
        name = p.group.split("/")[0] if p.family in (LINEAR, ELEMENTWISE) else f"{p.source} {p.group}"
        if p.family == LINEAR and p.op != "gemm":
            errors = held_out(p, "m", by_linear)
        elif p.family == ELEMENTWISE:
            errors = held_out(p, "tokens", by_elementwise)
        elif p.family == PREFILL:
            errors = held_out(one_chunk_rows(p), "chunk", by_prefill)
        elif p.family == DECODE:
            errors = held_out(p, "past", by_decode)
        elif p.family == COLLECTIVE:
            errors = held_out(p, "bytes", by_collective)
        else:
            continue
        found.setdefault((p.device, name, p.family), []).append(errors)
    return {key: np.concatenate(value) for key, value in sorted(found.items())}


OPS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
LIGHT = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add", "add")


def layers(profiles: Sequence[OperatorProfile]) -> dict[str, Errors]:
    """Whole iterations of each (device, model): per layer the matrix products, elementwise operators, all-reduces
    (vLLM's) and attention (vLLM's, of the same heads), at token counts that each of them had held out. Prompts of T
    tokens, and T decodes of 1 K cached tokens each. Pairs whose heads or all-reduce no source measured are left out."""
    found: dict[str, list[float]] = {}
    groups = sorted({(p.device, p.group) for p in profiles if p.family == LINEAR and p.op != "gemm"})
    for device, group in groups:
        own = {p.op: p for p in profiles if p.device == device and p.group == group}
        tp = int(group.rsplit("tp", 1)[1])
        hidden = int(own["attn_pre_proj"].x["k"][0])
        q = int(own["attn_post_proj"].x["k"][0]) // 128
        kv = (int(own["attn_pre_proj"].x["n"][0]) // 128 - q) // 2
        reduce = [p for p in profiles if p.device == device and p.source == "vllm_graph" and tp > 1]
        counts = [t for t in own["attn_pre_proj"].x["m"] if 8 <= t <= 4096]
        for kind, family, size in (("prompt", PREFILL, "chunk"), ("decode", DECODE, "batch")):
            source = next(
                (p for p in profiles if p.device == device and p.family == family and "vllm" in p.source), None
            )
            if source is None:
                continue
            heads = source.where((source.x["q_heads"] == q) & (source.x["kv_heads"] == kv))
            heads = one_chunk_rows(heads) if family == PREFILL else heads.where(heads.x["past"] == 1023)
            for t in counts:
                if t not in heads.x[size]:
                    continue
                pair = _iteration(own, heads, reduce, t, size, tp, hidden, source, (q, kv))
                if pair is not None:
                    found.setdefault(f"{device} {group} {kind}", []).append(abs(pair[0] / pair[1] - 1.0))
    return {key: np.array(value) for key, value in found.items() if len(value) > 2}


def _iteration(
    own: dict[str, OperatorProfile], heads: OperatorProfile, reduce: list[OperatorProfile],
    t: float, size: str, tp: int, hidden: int,
    source: OperatorProfile, rank: tuple[int, int],
) -> tuple[float, float] | None:  # fmt: skip
    """(predicted, measured) ms of a layer with every measurement at t left out of every fit."""
    predicted = measured = 0.0
    for op in (*OPS, *LIGHT):
        p = own[op]
        column = "m" if p.family == LINEAR else "tokens"
        test, train = p.where(p.x[column] == t), p.where(p.x[column] != t)
        predicted += float((by_linear if p.family == LINEAR else by_elementwise)(train, test)[0])
        measured += float(test.ms[0])
    for p in reduce:
        here = (p.x["workers"] == tp) & (p.x["bytes"] == t * hidden * 2)
        if not here.any():
            return None
        predicted += 2 * float(by_collective(p.where((p.x["workers"] == tp) & ~here), p.where(here))[0])
        measured += 2 * float(p.ms[here][0])
    here = heads.x[size] == t
    train, test = heads.where(~here), heads.where(here)
    if size == "chunk":
        if len(train) < 4:
            return None
        predicted += float(by_prefill(train, test)[0])
    else:
        whole = source.where(
            (source.x["q_heads"] == rank[0]) & (source.x["kv_heads"] == rank[1]) & (source.x["batch"] != t)
        )
        predicted += float(by_decode(whole, test)[0])
    measured += float(test.ms[0])
    return predicted, measured


def unseen_models(profiles: Sequence[OperatorProfile]) -> dict[tuple[str, str], dict[str, Errors]]:
    """Each model left out with every matrix shape and width that it uses, of all owners: by family, and its layer."""
    found: dict[tuple[str, str], dict[str, Errors]] = {}
    for device in sorted({p.device for p in profiles if p.family == LINEAR}):
        linear = [p for p in profiles if p.device == device and p.family == LINEAR]
        light = [p for p in profiles if p.device == device and p.family == ELEMENTWISE]
        for model in sorted({p.group.split("/")[0] for p in linear if p.op != "gemm"}):
            mine = [p for p in linear if p.group.split("/")[0] == model]
            light_mine = [p for p in light if p.group.split("/")[0] == model]
            shapes = {(k, n) for p in mine for k, n in zip(p.x["k"], p.x["n"], strict=True)}
            widths = {(p.op, w) for p in light_mine for w in p.x["width"]}
            rest = [_without(p, shapes) for p in linear]
            products = fit_linear(device, [p for p in rest if len(p)])
            others = fit_elementwise([p for p in light if (p.op, p.x["width"][0]) not in widths])
            sums: dict[str, tuple[Column, Column]] = {}
            errors: dict[str, list[Errors]] = {LINEAR: [], ELEMENTWISE: []}
            for p in (*mine, *light_mine):
                if p.family == LINEAR:
                    guess = products.ms(p.x["m"], int(p.x["k"][0]), int(p.x["n"][0]))
                elif p.op in others.curves:
                    guess = others.ms(p.op, p.x["tokens"], int(p.x["width"][0]))
                else:
                    continue
                errors[p.family].append(error(guess, p.ms))
                times = LIGHT.count(p.op) if p.family == ELEMENTWISE else 1
                have = sums.get(p.group, (np.zeros(len(p)), np.zeros(len(p))))
                sums[p.group] = (have[0] + times * guess, have[1] + times * p.ms)
            row = {family: np.concatenate(value) for family, value in errors.items() if value}
            row["layer"] = np.concatenate([error(a, b) for a, b in sums.values()])
            found[device, model] = row
    return found


def _without(p: OperatorProfile, shapes: set[tuple[float, float]]) -> OperatorProfile:
    return p.where(np.array([(k, n) not in shapes for k, n in zip(p.x["k"], p.x["n"], strict=True)], dtype=np.bool_))


def unseen_runs(profiles: Sequence[OperatorProfile]) -> dict[str, Errors]:
    """Each model's elementwise operators read off the other models' of the same width."""
    found: dict[str, Errors] = {}
    light = [p for p in profiles if p.family == ELEMENTWISE]
    for device, model in sorted({(p.device, p.group.split("/")[0]) for p in light}):
        mine = [p for p in light if (p.device, p.group.split("/")[0]) == (device, model)]
        others = fit_elementwise([p for p in light if p.device == device and p not in mine])
        errors = [
            error(others.ms(p.op, p.x["tokens"], width), p.ms)
            for p in mine
            for width in (int(p.x["width"][0]),)
            if str(width) in others.curves.get(p.op, {})
        ]
        if errors:
            found[f"{device} {model}"] = np.concatenate(errors)
    return found


def unseen_heads(profiles: Sequence[OperatorProfile]) -> dict[str, Errors]:
    """Each head count of the attention grids left out."""
    found: dict[str, Errors] = {}
    for p in profiles:
        if p.family not in (PREFILL, DECODE) or p.source == "frontier":
            continue
        rows = one_chunk_rows(p) if p.family == PREFILL else p
        parts = []
        for q, kv in np.unique(np.stack([rows.x["q_heads"], rows.x["kv_heads"]], axis=1), axis=0):
            here = (rows.x["q_heads"] == q) & (rows.x["kv_heads"] == kv)
            predict = by_prefill if p.family == PREFILL else by_decode
            parts.append(error(predict(rows.where(~here), rows.where(here)), rows.ms[here]))
        found[f"{p.device} {p.source} {p.family}"] = np.concatenate(parts)
    return found


def extrapolation(profiles: Sequence[OperatorProfile]) -> dict[str, Errors]:
    """Fitted up to a size, tested beyond it."""
    found: dict[str, list[Errors]] = {}

    def add(
        name: str,
        rows: OperatorProfile,
        column: str,
        top: float,
        predict: Callable[[OperatorProfile, OperatorProfile], Column],
    ) -> None:
        train, test = rows.where(rows.x[column] <= top), rows.where(rows.x[column] > top)
        if len(test) and len(train) > 3:
            found.setdefault(name, []).append(error(predict(train, test), test.ms))

    for p in profiles:
        if p.family == LINEAR and p.op != "gemm" and p.x["m"].max() > 8192:
            add(f"linear, {p.device}: rows <= 4096 -> 32768", p, "m", 4096, by_linear)
        if p.family == ELEMENTWISE and p.x["tokens"].max() > 8192:
            add(f"elementwise, {p.device}: rows <= 4096 -> 32768", p, "tokens", 4096, by_elementwise)
        if p.family == PREFILL and p.source != "frontier":
            add(f"prompts, {p.device} {p.source}: <= 4096 -> 16384", one_chunk_rows(p), "chunk", 4096, by_prefill)
        if p.family == PREFILL and p.x["past"].max() > 8192:
            rows = one_chunk_rows(p)
            add(f"history, {p.device}: <= 3100 -> 12416", rows, "past", 3100, by_prefill)
        if p.family == DECODE and p.source != "frontier":
            add(f"decodes, {p.device} {p.source}: history <= 4095 -> 65535", p, "past", 4095, by_decode)
            add(f"decodes, {p.device} {p.source}: history <= 16383 -> 65535", p, "past", 16383, by_decode)
    return {name: np.concatenate(value) for name, value in found.items()}


def unseen_shapes(profiles: Sequence[OperatorProfile]) -> dict[str, Errors]:
    """Shapes of a general GEMM grid left out, asked for as that library's products, and as the layer profiles'."""
    found: dict[str, list[Errors]] = {}
    for grid in (p for p in profiles if p.op == "gemm"):
        layers_ = [p for p in profiles if p.device == grid.device and p.family == LINEAR and p.op != "gemm"]
        shapes = sorted({(k, n) for k, n in zip(grid.x["k"], grid.x["n"], strict=True)})
        for fold in range(FOLDS):
            out = set(shapes[fold::FOLDS])
            here = np.array([(k, n) in out for k, n in zip(grid.x["k"], grid.x["n"], strict=True)])
            fit = fit_linear(grid.device, [*layers_, grid.where(~here)])
            for k, n in out:
                test = grid.where((grid.x["k"] == k) & (grid.x["n"] == n))
                for library in (grid.source, LAYERS):
                    guess = fit.derived_ms(test.x["m"], int(k), int(n), library)
                    found.setdefault(f"{grid.device} {grid.source}, asked as {library}", []).append(
                        error(guess, test.ms)
                    )
    return {name: np.concatenate(parts) for name, parts in found.items()}


def unseen_devices(profiles: Sequence[OperatorProfile]) -> dict[tuple[str, str], Errors]:
    """Each profiled die derived from the other one: predicted / measured by (direction, family), of one attention
    library (the preferred one)."""
    dies = ("a100-80gb", "h100-80gb")
    found: dict[tuple[str, str], list[Errors]] = {}
    for source, target in (dies, dies[::-1]):
        fit, scaling = fit_device(source, profiles), DeviceScaling(accelerator(source), accelerator(target))
        assert fit.linear is not None
        assert fit.elementwise is not None
        assert fit.prefill is not None
        assert fit.decode is not None
        library, reads = preferred_source(list(fit.prefill.own)), preferred_source(list(fit.decode.grids))
        engine = library.split("-")[0]
        for p in (p for p in profiles if p.device == target):
            if p.family == LINEAR and p.op != "gemm":
                k, n = int(p.x["k"][0]), int(p.x["n"][0])
                guess = scaling.products_ms(fit.linear.ms(p.x["m"], k, n), p.x["m"], k, n)
            elif p.family == ELEMENTWISE and p.op in fit.elementwise.curves:
                guess = scaling.elementwise_ms(fit.elementwise.ms(p.op, p.x["tokens"], int(p.x["width"][0])))
            elif p.family in (PREFILL, DECODE) and p.source.startswith(engine):
                for rows, heads in by_heads(one_chunk_rows(p) if p.family == PREFILL else p):
                    if p.family == PREFILL:
                        start = fit.prefill.own_ms(np.ones(1), heads, library)
                        guess = scaling.prefill_ms(fit.prefill.own_ms(rows.x["chunk"], heads, library), start)
                    else:
                        moved = 4e3 * rows.x["batch"] * rows.x["past"] * heads[1] * fit.decode.head_dim
                        ms = fit.decode.ms(rows.x["batch"], rows.x["past"], heads, reads)
                        guess = scaling.decode_ms(ms, moved / fit.decode.speed(reads))
                    found.setdefault((f"{target} from {source}", p.family), []).append(guess / rows.ms)
                continue
            else:
                continue
            found.setdefault((f"{target} from {source}", p.family), []).append(guess / p.ms)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def by_heads(profile: OperatorProfile) -> Iterable[tuple[OperatorProfile, tuple[int, int]]]:
    """The rows of each head count."""
    for q, kv in np.unique(np.stack([profile.x["q_heads"], profile.x["kv_heads"]], axis=1), axis=0):
        yield profile.where((profile.x["q_heads"] == q) & (profile.x["kv_heads"] == kv)), (int(q), int(kv))


def show(title: str, rows: Iterable[tuple[str, Errors]]) -> list[float]:
    """Print one table; returns the means."""
    print(f"\n{title}\n{'':<58}{'n':>7}{'mean %':>9}{'P90 %':>9}")
    means = []
    for name, errors in rows:
        if errors.size:
            means.append(100 * float(errors.mean()))
            print(f"{name:<58}{errors.size:>7}{means[-1]:>9.1f}{100 * np.quantile(errors, 0.9):>9.1f}")
    print(f"{'mean of the rows; worst row':<58}{'':>7}{np.mean(means):>9.1f}{max(means):>9.1f}")
    return means


def medha() -> None:
    """Isolated prefill against the statements that Medha makes, or that follow from them (never fitted to)."""
    print("\nMedha's settings (t_target a stage): seconds to prefill alone; unvalidated beyond the measured history")
    told: tuple[tuple[str, str, str, ParallelLayout, float, tuple[int, ...]], ...] = (
        ("8B, 16 x A100, TP8 x 2 stages", "a100", "llama-3-8b", ParallelLayout(tp=8, stages=2), 0.020, MEDHA_LENGTHS),
        ("70B, 8 x H100, TP8", "h100", "llama-3-70b", ParallelLayout(tp=8), 0.050, (131072, 1_000_000)),
        ("70B, 64 x H100, TP8 x 8 stages", "h100", "llama-3-70b", ParallelLayout(tp=8, stages=8), 0.030, (1_000_000,)),
    )  # fmt: skip
    for title, device, model, layout, target, lengths in told:
        for split in SPLITS:
            cache = PrefillCache(fitted(device, model, layout, assumptions=EngineAssumptions(split_kv=split)), target)
            cells = ", ".join(f"{n:,}: {cache.total_s(n):.3g} s" for n in lengths)
            print(f"{title}, {target * 1e3:.0f} ms, split KV {split}: {cells}")
    for split in SPLITS:
        model8 = fitted("h100", "llama-3-8b", ParallelLayout(tp=8), assumptions=EngineAssumptions(split_kv=split))
        model70 = fitted("h100", "llama-3-70b", ParallelLayout(tp=8), assumptions=EngineAssumptions(split_kv=split))
        step = 1e3 * (model8.attention_s(1_000_000, 512) + float(model8.token_s(512, 512)[0]))
        ratio = model70.attention_s(500_000, 32) * 64 / model70.attention_s(500_000, 2048)
        name = f"split KV {split}"
        print(f"{name}: 8B on 8 x H100, chunk 512 at 1M: {step:.0f} ms (paper: about 250 ms)")
        print(f"{name}: 70B attention, 32-token chunks against 2048 at 1M: {ratio:.2f}x (paper: 1.11x)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of profiles")
    parser.add_argument("--quick", action="store_true", help="without the models left out (half a minute less)")
    arguments = parser.parse_args()
    profiles = read_all(files(arguments.profiles))
    from benchmarks import latency_bands

    pairs, devices = families(profiles), unseen_devices(profiles)
    for family in (LINEAR, ELEMENTWISE, PREFILL, DECODE, COLLECTIVE):
        show(f"Sizes held out: {family}", ((f"{d} {m}", e) for (d, m, f), e in pairs.items() if f == family))
    show("Whole iterations, their token count held out", layers(profiles).items())
    if not arguments.quick:
        models = unseen_models(profiles)
        for family in (LINEAR, ELEMENTWISE, "layer"):
            show(
                f"Models left out: {family}",
                ((f"{d} {m}", row[family]) for (d, m), row in models.items() if family in row),
            )
        heads = unseen_heads(profiles)
        show("Head counts left out", heads.items())
        shapes = unseen_shapes(profiles)
        show("Shapes of a general grid left out", shapes.items())
        latency_bands.show(
            [
                *latency_bands.inside(pairs, models, heads, unseen_runs(profiles), shapes),
                *latency_bands.devices(devices),
                *latency_bands.derived_rings(profiles),
                *latency_bands.beyond(profiles),
            ]
        )
    show("Batches of prompts, head counts left out", latency_bands.batched(profiles))
    show("Devices left out", ((": ".join(key), np.abs(ratios - 1.0)) for key, ratios in devices.items()))
    show("Beyond the fitted sizes", extrapolation(profiles).items())
    medha()


if __name__ == "__main__":
    main()
