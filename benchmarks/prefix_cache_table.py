"""Hit rates and latencies of simulated prefix caches: `python -m benchmarks.prefix_cache_table`.

Two traces on 8 × A100, Llama-3-8B: Mooncake's conversations, and agents (claude-code-weka: coding agents that call
tools; its sessions start at random times, and a turn follows the answer before it and the think time). Sizes of the
cache, orders of eviction, placements with and without affinity, beside the trace's ideal (one infinite cache for all).
Virtual time: figures do not depend on the machine that runs it. Writes docs/reference/prefix-cache-table.md;
`--window S` takes the first seconds of the conversations and prints only.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

from headway.sim.build import run_scenario, workload_of
from headway.sim.scenario import Scenario, parse_scenario
from headway.sim.sweep import run_in_processes
from headway.sim.workload.traces import shared_tokens

SHARED = Path(os.environ.get("SHARED_DATA", Path(__file__).resolve().parents[2] / "shared")) / "data" / "traces"
CONVERSATIONS = SHARED / "mooncake-conversation" / "conversation_0-2400s.jsonl.gz"
AGENTS = SHARED / "claude-code-weka" / "requests.csv.gz"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "prefix-cache-table.md"
WINDOW_S = 180.0
SESSIONS, TURNS, SESSIONS_A_SECOND, LONGEST = 12, 10, 0.05, 400_000
"""Of the agents: sessions, the first requests of each, how often a session starts, and the longest prompt: a replica
must hold it."""
BLOCK = 64
SIZES: tuple[str | int, ...] = (0, "4 GiB", "16 GiB", "pool", "infinite")
PLACEMENTS = ("jsq", "pecsched", "ladder", "tetris")


class Run(NamedTuple):
    """One row of the table."""

    trace: str
    placement: str
    size: str | int
    eviction: str
    affinity: bool
    window_s: float


def scenario_of(run: Run) -> Scenario:
    """Return a row's scenario, without a limit on the time that answers take."""
    split = [{"count": 6, "role": "prefill"}, {"count": 2, "role": "decode"}]
    workload: dict[str, Any] = {"trace": str(CONVERSATIONS), "slice": f"0s:{run.window_s}s"}
    if run.trace == "agents":
        sessions = {"count": SESSIONS, "turns": TURNS, "max_think_s": 60.0}
        workload = {"trace": str(AGENTS), "sessions": sessions, "arrivals": "poisson"}
        workload |= {"qps": SESSIONS_A_SECOND, "max_prompt": LONGEST}
    return parse_scenario(
        {
            "cluster": {
                "accelerator": "a100-80gb", "placement": run.placement,
                "options": {"affinity": True} if run.affinity and run.placement != "ladder" else {},
                "pools": [{"count": 8}] if run.placement == "jsq" else split,
            },
            "model": "llama-3-8b",
            "memory": {"block_tokens": BLOCK},
            "prefix_cache": {"size": run.size, "eviction": run.eviction},
            "workload": workload,
        }
    )  # fmt: skip


def simulated(run: Run) -> dict[str, Any]:
    """Return the figures of a row's simulation."""
    sim = run_scenario(scenario_of(run), 0).sim
    summary = sim.summary().total
    use = sim.use_json().get("prefix_cache") or {"hit_rate": 0.0}
    tokens = sum(replica.prefill_tokens for replica in sim.replicas) + sim.spans.tokens
    return {"hit_rate": use["hit_rate"], "computed": tokens, **summary.latencies["ttft_s"], "ok": summary.ok}


def rows_of(trace: str, window_s: float) -> list[Run]:
    """Return the table's rows. The order of eviction matters to caches that fill, with affinity most."""
    plain = [Run(trace, "jsq", size, "lru", False, window_s) for size in SIZES]
    near = [Run(trace, "jsq", size, name, True, window_s) for size in SIZES[1:-1] for name in ("lru", "cost")]
    others = [
        Run(trace, name, "pool", "lru", affinity, window_s)
        for name in PLACEMENTS[1:]
        for affinity in (False, True)
        if affinity or name != "ladder"
    ]
    return [*plain, *near, Run(trace, "jsq", SIZES[-1], "lru", True, window_s), *others]


HEAD = (
    "| placement | size | eviction | affinity | cached | of ideal | computed tokens | TTFT P50 | P90 | P99 |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)


def part(trace: str, window_s: float, jobs: int) -> str:
    """Return the page's part on one trace."""
    rows = rows_of(trace, window_s)
    requests = workload_of(scenario_of(rows[0]), 0)
    best = shared_tokens(requests, BLOCK) / sum(request.prompt_tokens for request in requests)
    what = f"Mooncake's conversations, first {window_s:g} s"
    if trace == "agents":
        what = (
            f"Agents that call tools (claude-code-weka), {SESSIONS} sessions of at most {TURNS} requests in closed "
            "loop, think times up to 60 s"
        )
    text = (
        f"## {trace.capitalize()}\n\n{what}: {len(requests):,} requests, ideal {best:.1%} of prompt tokens.\n\n{HEAD}"
    )
    for run, found in zip(rows, run_in_processes(simulated, rows, jobs), strict=True):
        assert found["ok"] == len(requests), run
        times = " | ".join(f"{found[cut]:.2f} s" for cut in ("p50", "p90", "p99"))
        name = "none" if run.size == 0 else run.size
        text += (
            f"| `{run.placement}` | {name} | {run.eviction if run.size else ''} | {'yes' if run.affinity else 'no'} "
            f"| {found['hit_rate']:.1%} | {found['hit_rate'] / best:.0%} | {found['computed'] / 1e6:.1f}M | {times} |\n"
        )
    return text


def page(window_s: float, jobs: int) -> str:
    """Return the page."""
    return (
        "<!-- Generated by benchmarks/prefix_cache_table.py: do not edit. -->\n\n# Table of prefix caches\n\n"
        "8 × A100 80 GB, Llama-3-8B: one replica each (`jsq`), or 6 that prefill and 2 that decode. Ideal: one "
        "infinite cache for all. Size: of each instance; pool: what its memory leaves; more than that is memory beside "
        "it, from which loading costs nothing. With affinity, prefixes of other instances are copied where that is "
        "faster than computing them; a copy takes its time on the links. Mooncake's tool-agent trace is not among the "
        "shared data: agents stand for it. Virtual time; `python -m benchmarks.prefix_cache_table`.\n\n"
        + "\n".join(part(trace, window_s, jobs) for trace in ("conversations", "agents"))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--window", type=float, metavar="S", help="take the first seconds, and print only")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    arguments = parser.parse_args()
    text = page(arguments.window or WINDOW_S, arguments.jobs)
    if arguments.window is None:
        PAGE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
