"""How long short prompts wait under Weave and under jsq: `python -m benchmarks.weave_shorts`.

Llama-3 8B on eight A100s: under Weave six prefill and two decode, beside which prompts prefill that would wait; under
jsq eight do both, or only six, so that as many prefill. Prompts of up to 8K tokens of Mooncake's conversations (if the
shared traces are there; 1,200 requests, as they came, stretched to each rate), of synthetic bursts of all sizes (gamma,
CV 5, geometric mean of the P99s of six seeds) and of chats beside 3% documents. Weave over jsq on eight: 0.73 to 1.02,
0.96 to 1.03 and 0.67 to 0.83. Virtual time: the figures do not depend on the machine.
"""

from __future__ import annotations

import math
from typing import Any

from benchmarks.prefix_cache_table import CONVERSATIONS
from headway import simulate

SHORT = 8192
SEEDS = 6
CHATS = [
    {"class": "chat", "share": 0.97, "prompt": "lognormal:median=600,p90=3000,max=8K", "output": "fixed:64"},
    {"class": "document", "share": 0.03, "prompt": "uniform:60K-200K", "output": "fixed:64"},
]
SPLIT = [{"role": "prefill", "count": 6}, {"role": "decode", "count": 2}]
CLUSTERS: tuple[dict[str, Any], ...] = (
    {"placement": "weave", "pools": SPLIT},
    {"placement": "jsq", "pools": [{"role": "mixed", "count": 8}]},
    {"placement": "jsq", "pools": [{"role": "mixed", "count": 6}]},
)


def short_p99_s(cluster: dict[str, Any], workload: dict[str, Any], seed: int) -> float:
    """Return the P99 of short prompts' time to first token, in seconds."""
    scenario = {
        "name": "shorts", "model": "llama-3-8b", "latency": {"source": "roofline"},
        "policy": {"policy": "lars", "chunking": "adaptive", "t_target_s": 0.25},
        "cluster": {"accelerator": "a100-80gb", **cluster}, "workload": workload,
    }  # fmt: skip
    records = simulate(scenario, seed=seed).records
    waits = sorted(r.token_s[0] - r.arrival_s for r in records if r.prompt_tokens <= SHORT)
    return waits[int(0.99 * len(waits))]


def workloads() -> dict[str, tuple[dict[str, Any], int]]:
    """Return each row's workload and how many seeds it takes."""
    rows: dict[str, tuple[dict[str, Any], int]] = {}
    if CONVERSATIONS.exists():
        for qps in (1.0, 1.5, 2.0, 2.5, 3.0):
            rows[f"Mooncake, {qps}/s"] = {"trace": str(CONVERSATIONS), "qps": qps, "slice": "0:1200"}, 1
    for qps in (1.0, 1.5, 2.0):
        bursts = {"preset": "mooncake-like", "arrivals": "gamma", "cv": 5, "requests": 400, "max_output": 64}
        rows[f"bursts, {qps}/s"] = bursts | {"qps": qps}, SEEDS
    for qps in (3.0, 5.0, 6.0, 8.0):
        rows[f"chats and documents, {qps}/s"] = {"qps": qps, "requests": int(120 * qps), "mix": CHATS}, 1
    return rows


def main() -> None:
    """Print the table."""
    print(f"{'prompts up to 8K: P99 TTFT, s':30} {'weave':>8} {'jsq, 8':>8} {'jsq, 6':>8}   weave over jsq of 8, 6")
    for name, (workload, seeds) in workloads().items():
        found = [
            math.exp(sum(math.log(short_p99_s(cluster, workload, seed)) for seed in range(seeds)) / seeds)
            for cluster in CLUSTERS
        ]
        weave, eight, six = found
        print(f"{name:30} {weave:8.2f} {eight:8.2f} {six:8.2f}   {weave / eight:.2f} {weave / six:.2f}", flush=True)


if __name__ == "__main__":
    main()
