"""Headway beside what others measured and predicted, on public data: `python -m benchmarks.yardsticks`.

Nothing here is fitted on what it is compared with. Sources, and what is covered:

* 32 runs of stock vLLM 0.22.1 on an A100 and an H100 (TimoSaemann/ppas-vllm, Apache-2.0): prompts of 25,000 tokens. The
  time in front of the GPU was fitted to the 12 of seeds 0 and 1 (`--fit` does it again); the other 20 are reported.
* One run of vLLM 0.19 on an RTX 4090 (casys-kaist/LLMServingSim, MIT), from that source's own measured times of a
  layer's parts, beside what LLMServingSim predicts from them.
* With `--deployments CSV`, `results_trainval/error_records.csv` of github.com/inference-sim/
  sim-to-real-accuracy-validation: mean latencies of vLLM on H100s as measured and as other simulators predicted them.
  Prints the mean absolute error over the deployments that Headway's latency model covers, which those are, and the same
  of every simulator in the file. vLLM's scheduler has stock settings. Time per token is E2E over the answer's tokens,
  as there (experiment/ground_truth.py). The request rates are those of the load profiles of the same name in
  github.com/inference-sim/training (default_args/*/profile.yaml), and for "reasoning" of
  training/trainval_data/README.md in inference-sim/inference-sim; they send at equal distances. These loads repeat some
  20 to 50 prompts for ever, and vLLM keeps prefixes by default, but whether these deployments did is not published:
  both columns are printed.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from headway.perf.hardware import model
from headway.perf.latency import table
from headway.perf.latency.table import DecodeTable, ServingOverhead, TableSource
from headway.sim.build import run_scenario
from headway.sim.metrics import RequestRecord, e2e_s, tpot_s, ttft_s
from headway.sim.scenario import parse_scenario

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
RUNS = DATA / "measured-vllm" / "runs.csv"
RTX4090 = DATA / "llmservingsim" / "RTX4090-Llama-3.1-8B"
FITTED_ON = ("0", "1")
"""Seeds of the runs that the time in front of the GPU is fitted to."""
TRIED_S = tuple(n * 1e-6 for n in range(0, 31, 2))
METRICS = ("TTFT", "TPOT", "E2E")


class Comparison(NamedTuple):
    """One run: mean TTFT, TPOT and E2E, seconds."""

    group: str
    predicted: tuple[float, float, float]
    measured: tuple[float, float, float]


def runs(path: Path = RUNS) -> list[dict[str, str]]:
    """The measured runs, one row each."""
    with path.open() as file:
        return list(csv.DictReader(file))


def simulated(data: Mapping[str, Any], rows: Iterable[str]) -> tuple[RequestRecord, ...]:
    """The records of a scenario over a trace of (arrival, prompt, output, cached tokens) rows."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,cached_tokens", *rows, ""]))
        return run_scenario(parse_scenario({**data, "workload": {"trace": str(trace)}}), 0).sim.records


def means(data: Mapping[str, Any], rows: Iterable[str]) -> tuple[float, float, float]:
    """Mean TTFT, TPOT and E2E of a scenario over a trace of (arrival, prompt, output) rows, seconds."""
    records = simulated(data, (f"{row},0" for row in rows))
    found = [[value for each in records if (value := of(each)) is not None] for of in (ttft_s, tpot_s, e2e_s)]
    ttft, tpot, e2e = (float(np.mean(values)) for values in found)
    return ttft, tpot, e2e


def compare(run: Mapping[str, str], front: Path | None = None) -> Comparison:
    """One measured run and its simulation. front: a profile whose server is in front of the engine."""
    data = {
        "engine": "vllm",
        "vllm": {
            "max_num_batched_tokens": int(run["max_num_batched_tokens"]),
            "max_num_seqs": int(run["max_num_seqs"]),
        },
        "model": "qwen2.5-3b",
        "cluster": {"accelerator": run["device"]},
        "latency": {"source": "fitted", **({"front": str(front)} if front else {})},
    }
    rows = [f"{at},{run['prompt_tokens']},{run['output_tokens']}" for at in run["arrivals_s"].split()]
    measured = tuple(float(run[f"mean_{name}_s"]) for name in ("ttft", "tpot", "e2e"))
    group = f"{run['device']}, {run['max_num_batched_tokens']} tokens a step"
    return Comparison(group, means(data, rows), measured)


def errors(found: Sequence[Comparison]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """predicted / measured - 1, by run and metric."""
    return np.array([np.array(each.predicted) / np.array(each.measured) - 1.0 for each in found])


def show(found: Sequence[Comparison]) -> None:
    """Print the median of absolute errors by group, and of all."""
    groups: dict[str, list[Comparison]] = defaultdict(list)
    for each in found:
        groups[each.group].append(each)
    for name, mine in [*groups.items(), ("all", list(found))]:
        off = errors(mine)
        cells = zip(METRICS, np.median(np.abs(off), axis=0), np.median(off, axis=0), strict=True)
        print(f"{name:>28} {len(mine):>3} runs", *(f"{m} {a:>6.1%} ({s:>+6.1%})" for m, a, s in cells))


def fit_front(measured: Sequence[Mapping[str, str]]) -> float:
    """Seconds a prompt token in front of the GPU that bring mean TTFT nearest, over runs, in logarithms."""
    off = {}
    with tempfile.TemporaryDirectory() as folder:
        for token_s in TRIED_S:
            front = Path(folder) / "front.json"
            source = TableSource(
                fingerprint="", provenance="", tokens=((0, 0.0), (1, 0.0)), chunks=((0, 0.0, 0.0), (1, 0.0, 0.0)),
                decode=(0.0, 0.0, 0.0), serving=ServingOverhead(token_s=token_s),
            )  # fmt: skip
            table.save(source, front)
            found = errors([compare(run, front) for run in measured])
            off[token_s] = float(np.abs(np.log1p(found[:, [0, 2]])).mean())
            print(f"{token_s * 1e6:>4.0f} µs a token: TTFT and E2E off by {off[token_s]:.1%} in the mean")
    return min(off, key=lambda token_s: off[token_s])


def layer_table(folder: Path = RTX4090) -> TableSource:
    """The latency table of that model on that device, summed from measured times of a layer's parts (µs)."""
    meta = yaml.safe_load((folder / "profile-meta.yaml").read_text())
    layers = 32
    dense: dict[int, float] = defaultdict(float)
    once = {"embedding", "final_layernorm"}
    for row in _rows(folder / "dense.csv"):
        dense[int(row["tokens"])] += float(row["time_us"]) * (1 if row["layer"] in once else layers)
    heads: dict[int, float] = defaultdict(float)
    for row in _rows(folder / "per_sequence.csv"):
        heads[int(row["sequences"])] += float(row["time_us"])
    some = sorted(heads)
    tokens = [(n, (us + float(np.interp(n, some, [heads[k] for k in some]))) * 1e-6) for n, us in sorted(dense.items())]
    attention = _rows(folder / "attention.csv")
    chunks: dict[int, dict[int, float]] = defaultdict(dict)
    decodes: dict[tuple[int, int], float] = {}
    for row in attention:
        chunk, past, n, kv = (int(float(row[k])) for k in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
        if chunk and not n:
            chunks[chunk][past] = float(row["time_us"])
        elif n and not chunk:
            decodes[n, kv] = float(row["time_us"])
    lines = [(0, 0.0, 0.0)]
    for chunk, points in sorted(chunks.items()):
        a, b = table.fit_line([(past, us) for past, us in sorted(points.items())])
        lines.append((chunk, a * layers * 1e-6, b * layers * 1e-6))
    counts, pasts = sorted({n for n, _ in decodes}), sorted({kv for _, kv in decodes})
    full = [kv for kv in pasts if all((n, kv) in decodes for n in counts)]
    grid = tuple(tuple(decodes[n, kv] * layers * 1e-6 for kv in full) for n in counts)
    per_token = 4.0 * 8 * 128 * layers / 1.008e12
    return TableSource(
        fingerprint="llama-3.1-8b|rtx4090", provenance=f"LLMServingSim's layers, vLLM {meta['vllm_version']}",
        tokens=((0, tokens[0][1]), *tokens), chunks=tuple(lines), decode=(0.0, 0.0, 0.0),
        decode_grid=DecodeTable(tuple(counts), tuple(full), grid, per_token),
    )  # fmt: skip


def beside_llmservingsim(folder: Path = RTX4090) -> None:
    """Print the run on an RTX 4090 as measured, as LLMServingSim predicts it, and as Headway does."""
    requests = sorted(
        map(json.loads, (folder / "requests.jsonl").read_text().splitlines()), key=lambda r: r["queued_ts"]
    )
    first = requests[0]["queued_ts"]
    rows = [f"{r['queued_ts'] - first},{r['input_toks']},{r['output_toks']}" for r in requests]
    memory = json.loads((folder / "config.json").read_text())["nodes"][0]["instances"][0]["npu_mem"]
    shape = model("llama-3.1-8b")
    room = memory["mem_size"] * 2**30 * memory["mem_util"] - shape.parameters * shape.dtype_bytes
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "table.json"
        table.save(layer_table(folder), file)
        data = {
            "engine": "vllm",
            "vllm": {"max_num_batched_tokens": 2048},
            "model": "llama-3.1-8b",
            "latency": {"source": "table", "file": str(file)},
            "memory": {"kv_tokens": int(room) // shape.kv_bytes_per_token},
        }
        ours = means(data, rows)
    ttft = [r["first_token_ts"] - r["queued_ts"] for r in requests]
    e2e = [r["last_token_ts"] - r["queued_ts"] for r in requests]
    tpot = [
        (w - t) / (r["output_toks"] - 1) for w, t, r in zip(e2e, ttft, requests, strict=True) if r["output_toks"] > 1
    ]
    measured = tuple(float(np.mean(values)) for values in (ttft, tpot, e2e))
    theirs = [line.split()[-1] for line in (folder / "their-summary.txt").read_text().splitlines() if " Mean " in line]
    print(f"vLLM 0.19 on an RTX 4090, {len(rows)} requests: measured, Headway, LLMServingSim")
    for name, took, said, other in zip(METRICS, measured, ours, theirs, strict=True):
        print(f"  {name:>4} mean {took:>8.3f} s  {said / took - 1:>+6.1%}  {other:>6}")


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


class LoadProfile(NamedTuple):
    """The load of a measured run: lengths in tokens, and the rate."""

    prompt: int
    output: int
    stages: tuple[tuple[float, float], ...]
    """(requests a second, seconds) in order."""


LOADS = {
    "codegen": LoadProfile(566, 247, ((5, 600), (10, 600))),
    "roleplay": LoadProfile(750, 251, ((6, 1200),)),
    "reasoning": LoadProfile(1034, 1448, ((1, 600),)),
}
"""By the CSV's `workload`. Of "general" (in its lighter form) no rates are published."""
NEMO = {
    "layers": 40, "hidden": 5120, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "mlp": 14336, "vocab": 131072,
}  # fmt: skip
MODELS: dict[str, str | dict[str, int]] = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "mistralai/Mistral-Nemo-Instruct-2407": NEMO,
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "01-ai/Yi-34B": "yi-34b",
}
BLOCK = 16
"""Tokens of a KV block of vLLM."""
COLUMNS = {"headway, computed": False, "headway, cached": True}
CSV_METRICS = {"ttft_mean": "TTFT", "itl_mean": "TPOT", "e2e_mean": "E2E"}


class Deployment(NamedTuple):
    """One measured deployment."""

    model: str
    workload: str
    tp: int
    max_num_batched_tokens: int
    precision: str
    hardware: str


def deployments(
    path: Path,
) -> tuple[dict[Deployment, dict[str, float]], dict[tuple[str, Deployment], dict[str, float]]]:
    """Return what was measured (ms, by metric) by deployment, and what each simulator predicted."""
    actual: dict[Deployment, dict[str, float]] = defaultdict(dict)
    predicted: dict[tuple[str, Deployment], dict[str, float]] = defaultdict(dict)
    with path.open() as file:
        for row in csv.DictReader(file):
            # stage -1: all stages of a deployment together
            if row["stage_index"] != "-1" or row["metric_name"] not in CSV_METRICS:
                continue
            one = Deployment(
                row["model"], row["workload"], int(row["tp"]), int(row["max_num_batched_tokens"]), row["precision"],
                row["hardware"],
            )  # fmt: skip
            actual[one][row["metric_name"]] = float(row["actual"])
            predicted[row["simulator"], one][row["metric_name"]] = float(row["predicted"])
    return actual, predicted


def left_out(one: Deployment, actual: dict[Deployment, dict[str, float]]) -> str:
    """Return why a deployment is not compared; empty: it is."""
    if one.hardware != "H100" or one.precision != "FP16":
        return f"{one.precision} on {one.hardware}: no profile"
    if one.model not in MODELS:
        return "no such model"
    if one.workload not in LOADS:
        return "its request rates are not published"
    twins = [other for other in actual if actual[other] == actual[one]]
    return f"repeats the measurement of {twins[0].workload!r}" if twins[0] != one else ""


def predicted_ms(one: Deployment, cached: bool) -> dict[str, float]:
    """Return the means as Headway predicts them, ms. cached: all full blocks of a prompt are found in the cache."""
    load, rows, begun_s = LOADS[one.workload], [], 0.0
    found = (load.prompt - 1) // BLOCK * BLOCK if cached else 0
    for rate, seconds in load.stages:
        rows += [f"{begun_s + i / rate},{load.prompt},{load.output},{found}" for i in range(int(rate * seconds))]
        begun_s += seconds
    data: dict[str, Any] = {
        "engine": "vllm",
        "vllm": {"max_num_batched_tokens": one.max_num_batched_tokens, "max_num_seqs": 128, "max_model_len": 4096},
        "model": MODELS[one.model],
        "cluster": {"accelerator": "h100-80gb"},
        "layout": {"tp": one.tp},
        "latency": {"source": "fitted"},
    }
    records = simulated(data, rows)
    whole = [e2e_s(record) or 0.0 for record in records]
    return {
        "ttft_mean": 1e3 * float(np.mean([ttft_s(record) or 0.0 for record in records])),
        "itl_mean": 1e3 * float(np.mean(whole)) / load.output,
        "e2e_mean": 1e3 * float(np.mean(whole)),
    }


def beside_others(path: Path) -> dict[str, Any]:
    """Print the errors of Headway and of the simulators in the CSV; return the last table."""
    actual, predicted = deployments(path)
    ours: dict[str, dict[Deployment, dict[str, float]]] = {name: {} for name in COLUMNS}
    for one in actual:
        name = f"{one.model}, tp{one.tp}, {one.workload}"
        if reason := left_out(one, actual):
            print(f"{name}: left out, {reason}")
            continue
        for column, cached in COLUMNS.items():
            ours[column][one] = predicted_ms(one, cached)
        for metric, says in CSV_METRICS.items():
            measured, mine = actual[one][metric], [ours[column][one][metric] for column in COLUMNS]
            cells = (f"{value:>8.1f} ({value / measured - 1:>+6.1%})" for value in mine)
            print(f"{name:>62} {says:>4} {measured:>8.1f} ms measured", *cells)
    covered = ours["headway, computed"]
    print(f"{len(covered)} of {len(actual)} deployments are covered. Mean absolute error:")
    by_name: dict[str, dict[Deployment, dict[str, float]]] = {**ours, **{label: {} for label, _ in predicted}}
    for (label, one), values in predicted.items():
        by_name[label] |= {one: values} if one in covered else {}
    shares = {}
    for label, errors_of in by_name.items():
        missed = {}
        for metric, says in CSV_METRICS.items():
            errors = [abs(v[metric] / actual[one][metric] - 1) for one, v in errors_of.items() if metric in v]
            missed[says] = [float(np.mean(errors)) if errors else None, len(errors)]
        shares[label] = missed
        print(f"{label:>26}", *(f"{says} {e:.1%} of {n}" if e is not None else "-" for says, (e, n) in missed.items()))
    return shares


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the time in front of the GPU again, on seeds 0 and 1")
    parser.add_argument("--deployments", type=Path, metavar="CSV", help="compare with these measured deployments only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.deployments is not None:
        found: Any = beside_others(arguments.deployments)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1))
        return 0
    measured = runs()
    if arguments.fit:
        best = fit_front([run for run in measured if run["seed"] in FITTED_ON])
        print(f"best: {best * 1e6:.0f} µs a token")
        return 0
    beside_llmservingsim()
    kept = [compare(run) for run in measured if run["seed"] not in FITTED_ON]
    print(f"vLLM 0.22.1, {len(kept)} of {len(measured)} runs; the term in front was fitted to the others.")
    print("Median of absolute errors (and of errors):")
    show(kept)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([each._asdict() for each in kept], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
