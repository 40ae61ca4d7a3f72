"""Simulated against measured vLLM deployments, the public yardstick: `python -m benchmarks.vllm_yardstick CSV`.

CSV: `results_trainval/error_records.csv` of github.com/inference-sim/sim-to-real-accuracy-validation, with latencies of
vLLM on H100s as measured (`actual`) and as other simulators predicted them. Prints the mean absolute error of mean
TTFT, TPOT and E2E over the deployments that Headway's latency model covers, which those are, and the same of every
simulator whose rows the file has. Nothing is tuned on these figures: iteration times are the fit that ships, and
vLLM's scheduler is simulated with stock settings.

The measured time per token is E2E over the answer's tokens (experiment/ground_truth.py there), and so is this one. The
CSV has no request rates: they are those of the load profiles of the same name in github.com/inference-sim/training
(default_args/*/profile.yaml), and for "reasoning" of training/trainval_data/README.md in inference-sim/inference-sim;
they send at equal distances. These loads repeat some 20 to 50 prompts for ever, and vLLM keeps prefixes by default, but
whether these deployments did is not published: both columns are printed.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.sim.build import run_scenario
from headway.sim.metrics import e2e_s, ttft_s
from headway.sim.scenario import parse_scenario


class LoadProfile(NamedTuple):
    """What was sent."""

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
METRICS = {"ttft_mean": "TTFT", "itl_mean": "TPOT", "e2e_mean": "E2E"}


class Deployment(NamedTuple):
    """One measured deployment."""

    model: str
    workload: str
    tp: int
    max_num_batched_tokens: int
    precision: str
    hardware: str


def read(path: Path) -> tuple[dict[Deployment, dict[str, float]], dict[tuple[str, Deployment], dict[str, float]]]:
    """Return what was measured (ms, by metric) by deployment, and what each simulator predicted."""
    actual: dict[Deployment, dict[str, float]] = defaultdict(dict)
    predicted: dict[tuple[str, Deployment], dict[str, float]] = defaultdict(dict)
    with path.open() as file:
        for row in csv.DictReader(file):
            # stage -1: all stages of a deployment together
            if row["stage_index"] != "-1" or row["metric_name"] not in METRICS:
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


def simulate(one: Deployment, cached: bool) -> dict[str, float]:
    """Return the means as Headway predicts them, ms. cached: all full blocks of a prompt are found in the cache."""
    load, rows, begun_s = LOADS[one.workload], [], 0.0
    found = (load.prompt - 1) // BLOCK * BLOCK if cached else 0
    for rate, seconds in load.stages:
        rows += [f"{begun_s + i / rate},{load.prompt},{load.output},{found}" for i in range(int(rate * seconds))]
        begun_s += seconds
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.csv"
        trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,cached_tokens", *rows, ""]))
        data: dict[str, Any] = {
            "engine": "vllm",
            "vllm": {"max_num_batched_tokens": one.max_num_batched_tokens, "max_num_seqs": 128, "max_model_len": 4096},
            "model": MODELS[one.model],
            "cluster": {"accelerator": "h100-80gb"},
            "layout": {"tp": one.tp},
            "latency": {"source": "fitted"},
            "workload": {"trace": str(trace)},
        }
        records = run_scenario(parse_scenario(data, one.model), 0).sim.records
    whole = [e2e_s(record) or 0.0 for record in records]
    return {
        "ttft_mean": 1e3 * float(np.mean([ttft_s(record) or 0.0 for record in records])),
        "itl_mean": 1e3 * float(np.mean(whole)) / load.output,
        "e2e_mean": 1e3 * float(np.mean(whole)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    actual, predicted = read(arguments.csv)
    ours: dict[str, dict[Deployment, dict[str, float]]] = {name: {} for name in COLUMNS}
    for one in actual:
        name = f"{one.model}, tp{one.tp}, {one.workload}"
        if reason := left_out(one, actual):
            print(f"{name}: left out, {reason}")
            continue
        for column, cached in COLUMNS.items():
            ours[column][one] = simulate(one, cached)
        for metric, says in METRICS.items():
            measured, mine = actual[one][metric], [ours[column][one][metric] for column in COLUMNS]
            cells = (f"{value:>8.1f} ({value / measured - 1:>+6.1%})" for value in mine)
            print(f"{name:>62} {says:>4} {measured:>8.1f} ms measured", *cells)
    covered = ours["headway, computed"]
    print(f"{len(covered)} of {len(actual)} deployments are covered. Mean absolute error:")
    by_name: dict[str, dict[Deployment, dict[str, float]]] = {**ours, **{label: {} for label, _ in predicted}}
    for (label, one), values in predicted.items():
        by_name[label] |= {one: values} if one in covered else {}
    table = {}
    for label, errors_of in by_name.items():
        missed = {}
        for metric, says in METRICS.items():
            errors = [abs(v[metric] / actual[one][metric] - 1) for one, v in errors_of.items() if metric in v]
            missed[says] = [float(np.mean(errors)) if errors else None, len(errors)]
        table[label] = missed
        print(f"{label:>26}", *(f"{says} {e:.1%} of {n}" if e is not None else "-" for says, (e, n) in missed.items()))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
