"""Registry of experiments by id, in the papers' order: function, title and cost."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from typing import Literal, NamedTuple

from headway.core.errors import ConfigError
from headway_research.base import ExperimentReport, RunOptions
from headway_research.recorded import RecordedRun, in_words, recorded, totals


class ExperimentEntry(NamedTuple):
    """One line of `headway reproduce --list`."""

    function: str
    """Module of `headway_research` and function, as module:function; imported when it is chosen."""
    title: str
    cost: Literal["seconds", "minutes"] = "seconds"
    """CPU time in full (not `--quick`): seconds, up to about one minute; minutes, that or more for each seed."""


EXPERIMENTS: dict[str, ExperimentEntry] = {
    "medha.worked-example": ExperimentEntry("medha.worked_example:run", "§4.1: three requests under every policy"),
    "medha.eq1": ExperimentEntry(
        "medha.chunk_intensity:run", "Eq. 1: arithmetic intensity of a chunk; 40 tokens saturate an H100"
    ),
    "medha.fig1": ExperimentEntry("medha.fig1:run", "TTFT as the share of long requests grows from 0 to 5%", "minutes"),
    "medha.fig3b": ExperimentEntry("medha.chunk_attention:medha", "attention time of a 1M prefill by chunk size"),
    "medha.fig4": ExperimentEntry(
        "medha.adaptive_pareto:medha", "static against adaptive chunks: TTFT over the worst iteration"
    ),
    "medha.fig5b": ExperimentEntry(
        "medha.spp_against_cp:medha", "stream pipeline against context parallelism, 1M tokens"
    ),
    "medha.fig7": ExperimentEntry("medha.kvp_decode:fig7", "KV parallelism: decode alone and beside a chunk"),
    "medha.fig9": ExperimentEntry(
        "medha.fig9:fig9", "TTFT over the rate, chats alone and with 5% long requests", "minutes"
    ),
    "medha.fig10": ExperimentEntry("medha.fig9:fig10", "decode latency over the rate", "minutes"),
    "medha.fig11": ExperimentEntry(
        "medha.fig11:fig11", "2D against 3D parallelism: TTFT over the rate, 5% of up to 2M tokens", "minutes"
    ),
    "medha.fig12": ExperimentEntry(
        "medha.fig11:fig12", "2D against 3D parallelism: decode latency at a high rate", "minutes"
    ),
    "medha.fig13": ExperimentEntry(
        "medha.fig13:run", "FCFS, EDF, LRS, SRPT, LARS, with and without multi-prefill batching", "minutes"
    ),
    "medha.fig14": ExperimentEntry(
        "medha.fig14:run", "LoongServe with and without a pool for short prompts", "minutes"
    ),
    "medha.fig15": ExperimentEntry("medha.utilisation:prefill", "MFU of prefills, to 128 GPUs"),
    "medha.fig16": ExperimentEntry("medha.utilisation:decode", "MBU of decodes with KV parallelism"),
    "medha.fig17": ExperimentEntry(
        "medha.spp_scaling:prefill", "prefill scaling to 128 GPUs and 10M tokens; what memory does not allow"
    ),
    "medha.fig18": ExperimentEntry("medha.spp_scaling:decode", "decode latency as stages are added"),
    "medha.fig19": ExperimentEntry("medha.kvp_decode:fig19", "KV parallelism in decode-only batches"),
    "medha.fig20": ExperimentEntry("medha.kvp_tradeoff:trade", "TTFT against TBT by chunk and KV groups"),
    "medha.deadlines": ExperimentEntry(
        "medha.deadlines:run", "what hangs on the deadline that the paper leaves open", "minutes"
    ),
    "medha.headlines": ExperimentEntry(
        "medha.headlines:run", "5.7× throughput, 5× capacity, 250 ms at chunks of 512", "minutes"
    ),
    "mnemosyne.fig1": ExperimentEntry("medha.spp_scaling:overview", "up to 10M tokens on 128 GPUs"),
    "mnemosyne.fig5": ExperimentEntry("medha.mnemosyne_fig5:run", "resources for 30 s TTFT and 20 ms TBT"),
    "mnemosyne.fig7": ExperimentEntry(
        "medha.chunk_attention:mnemosyne", "attention time of a 1M prefill by chunk size"
    ),
    "mnemosyne.fig8": ExperimentEntry(
        "medha.adaptive_pareto:mnemosyne", "static against adaptive chunks; 1.75× at chunks of 32"
    ),
    "mnemosyne.fig13": ExperimentEntry(
        "medha.mnemosyne_fig13:run", "tensor parallelism alone against vLLM as contexts grow"
    ),
    "mnemosyne.fig14": ExperimentEntry(
        "medha.spp_against_cp:mnemosyne", "striped attention against SPP: latency and preemption"
    ),
    "mnemosyne.fig15": ExperimentEntry("medha.spp_scaling:prefill", "prefill scaling to 128 GPUs and 10M tokens"),
    "mnemosyne.fig16": ExperimentEntry("medha.spp_scaling:decode", "decode latency as stages are added"),
    "mnemosyne.fig17": ExperimentEntry("medha.kvp_decode:fig17", "KV parallelism in decode"),
    "mnemosyne.fig18": ExperimentEntry("medha.kvp_tradeoff:trade", "TTFT against TBT by chunk and KV groups"),
    "mnemosyne.fig19": ExperimentEntry("medha.kvp_tradeoff:timeline", "KV groups join as a prefill grows"),
    "mnemosyne.fig22": ExperimentEntry("medha.mnemosyne_fig22:run", "decodes beside a chunk: batch time"),
    "mnemosyne.headlines": ExperimentEntry("medha.mnemosyne_headlines:run", "1.75×, 30 ms TBT at 10M, 30 s TTFT at 2M"),
    "mnemosyne.amdahl": ExperimentEntry("medha.kvp_decode:amdahl", "KV parallelism as Amdahl's law with 4 : 1"),
    "tetris.worked-examples": ExperimentEntry("tetris.examples:worked", "§2.4's examples from Table 1's cells"),
    "tetris.table1": ExperimentEntry("tetris.examples:table1", "Eq. (1) fitted to Table 1"),
    "tetris.fig2": ExperimentEntry("tetris.overheads:fig2", "decode latency by TP, and by SP × TP on eight GPUs"),
    "tetris.fig8": ExperimentEntry(
        "tetris.capacity:fig8", "TTFT over the rate, and how much load each system carries", "minutes"
    ),
    "tetris.fig9": ExperimentEntry(
        "tetris.capacity:fig9", "TTFT at the highest load that the best baseline carries", "minutes"
    ),
    "tetris.fig10": ExperimentEntry("tetris.capacity:fig10", "throughput at each system's critical rate", "minutes"),
    "tetris.fig11": ExperimentEntry("tetris.ablation:fig11", "improvement rates by load, Llama-3 8B", "minutes"),
    "tetris.fig12": ExperimentEntry("tetris.ablation:fig12", "improvement rates by load, Llama-3 70B", "minutes"),
    "tetris.fig13": ExperimentEntry(
        "tetris.ablation:fig13", "what chunks are worth over single-chunk plans", "minutes"
    ),
    "tetris.chunking-bound": ExperimentEntry(
        "tetris.chunking_bound:run", "how much chunks can gain at all, by Eq. (1)"
    ),
    "tetris.fig14": ExperimentEntry("tetris.overheads:fig14", "what cache balancing and transfers add"),
    "tetris.table2": ExperimentEntry("tetris.overheads:table2", "planning time up to SP 128"),
    "tetris.loongserve": ExperimentEntry(
        "tetris.capacity:loongserve", "LoongServe as published beside what Tetris compares with", "minutes"
    ),
    "tetris.noise": ExperimentEntry(
        "tetris.capacity:noise", "30% execution noise: anchored and open-loop time lines", "minutes"
    ),
    "combined.tetris": ExperimentEntry(
        "combined.comparison:tetris",
        "The ladder and the placements of papers on Tetris's workloads",
        "minutes",
    ),
    "combined.azure": ExperimentEntry(
        "combined.comparison:azure", "the same on PecSched's rewriting of Azure's conversations", "minutes"
    ),
    "packing-prefetch.fig1": ExperimentEntry(
        "accelerator.stage_figures:fig1", "compute against HBM bandwidth, and what is bound by which"
    ),
    "packing-prefetch.slo": ExperimentEntry("accelerator.stage_figures:slo", "the TBT limits: 16.70 and 19.23 ms"),
    "packing-prefetch.case1": ExperimentEntry(
        "accelerator.stage_figures:case1", "speed-ups over prefill and KV tokens (Fig. 5)"
    ),
    "packing-prefetch.case2": ExperimentEntry(
        "accelerator.stage_figures:case2", "speed-ups over the prefetch buffer (Fig. 6)"
    ),
    "packing-prefetch.case3": ExperimentEntry(
        "accelerator.service_figures:case3", "requests a second within the SLO (Fig. 7)", "minutes"
    ),
    "packing-prefetch.case4": ExperimentEntry(
        "accelerator.service_figures:case4", "throughput against latency by chunk (Fig. 8)", "minutes"
    ),
    "packing-prefetch.sensitivity": ExperimentEntry(
        "accelerator.sensitivity:run", "gains of both over what the paper leaves open", "minutes"
    ),
    "pecsched.fig1": ExperimentEntry("pecsched.motivation:fig1", "lengths of Azure's requests"),
    "pecsched.fig2": ExperimentEntry(
        "pecsched.motivation:fig2", "short requests under FIFO, with and without long ones", "minutes"
    ),
    "pecsched.fig3": ExperimentEntry(
        "pecsched.motivation:fig3", "short requests under reservation and under FIFO", "minutes"
    ),
    "pecsched.table1": ExperimentEntry(
        "pecsched.motivation:table1", "idle share under reservation and under FIFO", "minutes"
    ),
    "pecsched.table2": ExperimentEntry(
        "pecsched.motivation:table2", "long requests that starve under priority", "minutes"
    ),
    "pecsched.table3": ExperimentEntry(
        "pecsched.motivation:table3", "preemptions of long prefills without fast SP", "minutes"
    ),
    "pecsched.fast-sp": ExperimentEntry(
        "pecsched.fast_sp:run", "§5.1, §5.3: what a pause keeps; forms of sequence parallelism"
    ),
    "pecsched.fig9": ExperimentEntry(
        "pecsched.overall:fig9", "queueing of short requests against FIFO, reservation, priority", "minutes"
    ),
    "pecsched.fig10": ExperimentEntry("pecsched.overall:fig10", "throughput of short requests", "minutes"),
    "pecsched.fig11": ExperimentEntry("pecsched.overall:fig11", "JCT of long requests", "minutes"),
    "pecsched.fig12": ExperimentEntry("pecsched.overall:fig12", "queueing of short requests, part by part", "minutes"),
    "pecsched.fig13": ExperimentEntry(
        "pecsched.overall:fig13", "throughput of short requests, part by part", "minutes"
    ),
    "pecsched.fig14": ExperimentEntry("pecsched.overall:fig14", "JCT of long requests, part by part", "minutes"),
    "pecsched.table6": ExperimentEntry(
        "pecsched.overall:table6", "suspensions of long requests, part by part", "minutes"
    ),
    "pecsched.headlines": ExperimentEntry(
        "pecsched.overall:headlines", "P99 queueing −92%, throughput +595%, long JCT", "minutes"
    ),
    "pecsched.table7": ExperimentEntry("pecsched.overhead:table7", "scheduling time over JCT", "minutes"),
    "pecsched.fig15": ExperimentEntry("pecsched.overhead:fig15", "scheduling time to 8,192 GPUs", "minutes"),
}


def names() -> list[str]:
    """Return all ids, in the papers' order."""
    return list(EXPERIMENTS)


def listing() -> str:
    """Return one line an experiment, at most 80 columns: id, CPU time of the last full run, how many claims hold, and
    title; then the totals of each paper and of all."""
    runs = recorded()
    lines = [f"{'id':28}{'cost':>7}  {'hold':>5}  what"]
    for name, entry in EXPERIMENTS.items():
        cells = _cells(runs[name]) if name in runs else ("none", "")
        lines.append(f"{name:28}{cells[0]:>7}  {cells[1]:>5}  {_cut(entry.title, 36)}")
    for paper in (*dict.fromkeys(name.partition(".")[0] for name in EXPERIMENTS), ""):
        ids = [name for name in EXPERIMENTS if name.startswith(paper)]
        words = (textwrap.wrap(line, 80) for line in in_words(totals(ids)).split("\n"))
        lines += ["", f"{paper or 'all papers'}:", *chain.from_iterable(words)]
    return "\n".join(lines)


def _cells(run: RecordedRun) -> tuple[str, str]:
    """Return cost and claims that hold as short texts."""
    claims = [row.state for row in run.rows if row.paper is not None]
    cost = f"{run.cpu_s:.0f} s" if run.cpu_s < 100 else f"{run.cpu_s / 60:.0f} min"
    # a cost of 0 was not kept, or is shared with an experiment above
    return cost if run.cpu_s else "-", f"{claims.count('holds')}/{len(claims)}" if claims else ""


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def experiment(name: str) -> Callable[[RunOptions], ExperimentReport]:
    """Return the function behind an id. ConfigError on an unknown id names close ones."""
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, EXPERIMENTS, n=4, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}?" if close else "`headway reproduce --list` shows all"
        raise ConfigError(f"no experiment {name!r}; {hint}")
    module, _, function = EXPERIMENTS[name].function.partition(":")
    found: Callable[[RunOptions], ExperimentReport] = getattr(import_module(f"headway_research.{module}"), function)
    return found
