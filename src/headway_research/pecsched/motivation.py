"""PecSched §3: lengths (Fig. 1), FIFO with and without long requests (Fig. 2), reservation (Fig. 3, Table 1), priority
(Table 2), preemptions without fast SP (Table 3). The setting and its regimes: `setting`."""

from __future__ import annotations

import numpy as np

from headway.sim.workload.generate import ConstantArrivals, preset
from headway_research.base import ExperimentReport, RunOptions
from headway_research.pecsched.setting import REGIMES, SERVED, PecSchedStudy
from headway_research.verdicts import ascending, at_least, at_most, band, every, judge, judge_same

FIFO_RATIO = {"Mistral-v0.3 7B": 2.5, "Phi-3 14B": 2.78, "Yi 34B": 3.84, "Llama-3.1 70B": 10.2}
FIFO_RPS = {"Mistral-v0.3 7B": 0.64, "Phi-3 14B": 0.56, "Yi 34B": 0.39, "Llama-3.1 70B": 0.19}
RESERVED_RATIO = {"Mistral-v0.3 7B": 1.2, "Phi-3 14B": 1.35, "Yi 34B": 1.8, "Llama-3.1 70B": 1.94}
RESERVED_RPS = {"Mistral-v0.3 7B": 0.49, "Phi-3 14B": 0.47, "Yi 34B": 0.46, "Llama-3.1 70B": 0.44}
PREEMPTED = {"Mistral-v0.3 7B": 167_394, "Phi-3 14B": 205_947, "Yi 34B": 278_504, "Llama-3.1 70B": 379_305}
IDLE = {"Mistral-v0.3 7B": 0.16, "Phi-3 14B": 0.22, "Yi 34B": 0.25, "Llama-3.1 70B": 0.41}
FIFO_IDLE = {"Mistral-v0.3 7B": 0.0004, "Phi-3 14B": 0.00009, "Yi 34B": 0.0005, "Llama-3.1 70B": 0.00008}
LONGEST = {"2023": 14_050, "2024": 8_000}
STARVED = {"Mistral-v0.3 7B": 0.92, "Phi-3 14B": 0.97, "Yi 34B": 1.0, "Llama-3.1 70B": 1.0}


def fig1(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 1 on the lengths of both traces: the paper cites that of 2024 and describes that of 2023.

    2023: Azure's conversations, to which the presets were fitted. 2024: coding and conversations, as published."""
    count = 2000 if options.quick else 50_000
    rng = np.random.default_rng(0)
    old = preset("azure-conv-like").draw(rng, ConstantArrivals(1.0), count)
    # the 2024 preset ends at the 95th percentile, so its share of short prompts is of 95%
    new = preset("pecsched-short-2024").draw(rng, ConstantArrivals(1.0), count)
    below = {
        "2023": float(np.mean([request.prompt_tokens < 2048 for request in old])),
        "2024": 0.95 * float(np.mean([request.prompt_tokens < 2048 for request in new])),
    }
    outputs = {
        year: float(np.mean([r.output_tokens < 800 for r in drawn])) for year, drawn in (("2023", old), ("2024", new))
    }
    rows = (
        judge_same("2023: share of prompts below 2,048 tokens", "about 80%", band(0.75, 0.85), below["2023"]),
        judge_same("2024: share of prompts below 2,048 tokens", "about 80%", band(0.75, 0.85), below["2024"]),
        judge_same("Share of outputs below 800 tokens", "all", every(at_least(0.985), "year"), outputs),
        judge_same(
            "The longest prompt of the trace, tokens",
            "around 9K (§6.2)",
            every(band(8_500, 9_500), "year"),
            LONGEST,
            "The figures of 2024 end at 7,690 (coding) and 8,000 (conversations).",
        ),
    )
    source = {
        "latency": "none",
        "scenario": "presets azure-conv-like, pecsched-short-2024",
        "seeds": [0],
        "window_s": 0.0,
    }
    return ExperimentReport(source=source, rows=rows)


def fig2(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 2: short requests under FIFO, with long requests and without."""
    why = "Where nothing queues without long requests the ratio has no meaningful size."
    return _beside(options, "FIFO", "FIFO, no longs", "with long ones over without", (FIFO_RATIO, FIFO_RPS), why)


def fig3(options: RunOptions) -> ExperimentReport:
    """Reproduce Fig. 3: short requests under reservation and under FIFO."""
    why = "Worse than FIFO only where short requests saturate their part of the cluster."
    return _beside(options, "Reservation", "FIFO", "under reservation over FIFO", (RESERVED_RATIO, RESERVED_RPS), why)


def _beside(
    options: RunOptions, system: str, peer: str, words: str, paper: tuple[dict[str, float], dict[str, float]], why: str
) -> ExperimentReport:
    """Return rows of queueing and throughput of short requests under a system, over those under its peer."""
    runs = PecSchedStudy(options)
    runs.ensure([(system, "default"), (peer, "default")], REGIMES)
    rows = []
    for regime in REGIMES:
        rows += [
            judge(
                f"{regime}: P99 queueing of short requests {words}",
                paper[0],
                every(at_least(1.0)),
                {"paper": None, "default": runs.ratios(system, peer, "default", regime, "delay_s")},
                why,
            ),
            judge(
                f"{regime}: throughput of short requests {words}",
                paper[1],
                every(at_most(0.95)),
                {"paper": None, "default": runs.ratios(system, peer, "default", regime, "short_rps")},
            ),
        ]
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows))


def table1(options: RunOptions) -> ExperimentReport:
    """Reproduce Table 1: idle share of the cluster under FIFO and under reservation."""
    runs = PecSchedStudy(options)
    runs.ensure([("FIFO", "default"), ("Reservation", "default")], REGIMES)
    rows = []
    for regime in REGIMES:
        rows += [
            judge(
                f"{regime}: idle share under reservation",
                IDLE,
                every(at_least(0.1)),
                {"paper": None, "default": runs.values("Reservation", "default", regime, "idle")},
            ),
            judge(
                f"{regime}: idle share under FIFO",
                FIFO_IDLE,
                every(at_most(0.001)),
                {"paper": None, "default": runs.values("FIFO", "default", regime, "idle")},
                "Replicas that wait for the others of a ring count as idle here.",
            ),
        ]
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows))


def table3(options: RunOptions) -> ExperimentReport:
    """Reproduce Table 3: preemptions of long prefills where sequence parallelism is plain ring attention (/FSP)."""
    runs = PecSchedStudy(options)
    runs.ensure([("/FSP", "default")], SERVED)
    rows = [
        judge(
            f"{regime}: preemptions of all long requests, for a long request",
            f"rising with the model: {', '.join(f'{count:,}' for count in PREEMPTED.values())} in all",
            ascending("rising with the model"),
            {"paper": None, "default": runs.quotients("/FSP", "default", regime, "pauses", "longs")},
            "The paper's number of requests is not stated, and our models run for different times.",
        )
        for regime in SERVED
    ]
    return ExperimentReport(source=runs.source(SERVED), rows=tuple(rows))


def table2(options: RunOptions) -> ExperimentReport:
    """Reproduce Table 2: long requests that never run under priority."""
    runs = PecSchedStudy(options)
    runs.ensure([("Priority", "default"), ("PecSched", "default"), ("PecSched", "paper")], REGIMES)
    rows = [
        judge(
            f"{regime}: share of long requests that starve under priority",
            STARVED,
            every(at_least(0.9)),
            {"paper": None, "default": runs.values("Priority", "default", regime, "starved")},
        )
        for regime in REGIMES
    ]
    rows += [
        judge(
            f"{regime}: share of long requests that starve under PecSched",
            None,
            every(at_most(0.0)),
            {mode: runs.values("PecSched", mode, regime, "starved") for mode in ("paper", "default")},
            "paper mode has no ageing.",
        )
        for regime in REGIMES
    ]
    return ExperimentReport(source=runs.source(REGIMES), rows=tuple(rows))
