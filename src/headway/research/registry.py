"""Every experiment: its id, the function that runs it (imported when it is chosen), and what it shows."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module

from headway.core.errors import ConfigError
from headway.research.base import ExperimentReport, RunOptions

EXPERIMENTS: dict[str, tuple[str, str]] = {
    "medha.worked-example": ("medha_worked_example:run", "§4.1: three requests under every policy"),
    "medha.eq1": ("chunk_intensity:run", "Eq. 1: arithmetic intensity of a chunk; 40 tokens saturate an H100"),
    "medha.fig1": ("medha_fig1:run", "TTFT as the share of long requests grows from 0 to 5%"),
    "medha.fig3b": ("chunk_attention:medha", "attention time of a 1M prefill by chunk size"),
    "medha.fig4": ("adaptive_pareto:medha", "static against adaptive chunks: TTFT over the worst iteration"),
    "medha.fig5b": ("spp_against_cp:medha", "stream pipeline against context parallelism, 1M tokens"),
    "medha.fig7": ("kvp_decode:fig7", "KV parallelism: decode alone and beside a chunk"),
    "medha.fig9": ("medha_fig9:fig9", "TTFT over the rate, chats alone and with 5% long requests"),
    "medha.fig10": ("medha_fig9:fig10", "decode latency over the rate"),
    "medha.fig11": ("medha_fig11:fig11", "2D against 3D parallelism: TTFT over the rate, 5% of up to 2M tokens"),
    "medha.fig12": ("medha_fig11:fig12", "2D against 3D parallelism: decode latency at a high rate"),
    "medha.fig13": ("medha_fig13:run", "FCFS, EDF, LRS, SRPT, LARS, with and without multi-prefill batching"),
    "medha.fig14": ("medha_fig14:run", "LoongServe with and without a pool for short prompts"),
    "medha.fig15": ("utilisation:prefill", "MFU of prefills, to 128 GPUs"),
    "medha.fig16": ("utilisation:decode", "MBU of decodes with KV parallelism"),
    "medha.fig17": ("spp_scaling:prefill", "prefill scaling to 128 GPUs and 10M tokens; what memory does not allow"),
    "medha.fig18": ("spp_scaling:decode", "decode latency as stages are added"),
    "medha.fig19": ("kvp_decode:fig19", "KV parallelism in decode-only batches"),
    "medha.fig20": ("kvp_tradeoff:trade", "TTFT against TBT by chunk and KV groups"),
    "medha.headlines": ("medha_headlines:run", "5.7× throughput, 5× capacity, 250 ms at chunks of 512"),
    "mnemosyne.fig1": ("spp_scaling:overview", "up to 10M tokens on 128 GPUs"),
    "mnemosyne.fig5": ("mnemosyne_fig5:run", "resources for 30 s TTFT and 20 ms TBT"),
    "mnemosyne.fig7": ("chunk_attention:mnemosyne", "attention time of a 1M prefill by chunk size"),
    "mnemosyne.fig8": ("adaptive_pareto:mnemosyne", "static against adaptive chunks; 1.75× at chunks of 32"),
    "mnemosyne.fig14": ("spp_against_cp:mnemosyne", "striped attention against SPP: latency and preemption"),
    "mnemosyne.fig15": ("spp_scaling:prefill", "prefill scaling to 128 GPUs and 10M tokens"),
    "mnemosyne.fig16": ("spp_scaling:decode", "decode latency as stages are added"),
    "mnemosyne.fig17": ("kvp_decode:fig17", "KV parallelism in decode"),
    "mnemosyne.fig18": ("kvp_tradeoff:trade", "TTFT against TBT by chunk and KV groups"),
    "mnemosyne.fig19": ("kvp_tradeoff:timeline", "KV groups join as a prefill grows"),
    "mnemosyne.fig22": ("mnemosyne_fig22:run", "decodes beside a chunk: batch time"),
    "mnemosyne.headlines": ("mnemosyne_headlines:run", "1.75×, 30 ms TBT at 10M, 30 s TTFT at 2M"),
    "mnemosyne.amdahl": ("kvp_decode:amdahl", "KV parallelism as Amdahl's law with 4 : 1"),
    "tetris.worked-examples": ("tetris_examples:worked", "§2.4's examples from Table 1's cells"),
    "tetris.table1": ("tetris_examples:table1", "Eq. (1) fitted to Table 1"),
    "tetris.fig2": ("tetris_overheads:fig2", "decode latency by TP, and by SP × TP on eight GPUs"),
    "tetris.fig8": ("tetris_capacity:fig8", "TTFT over the rate, and how much load each system carries"),
    "tetris.fig9": ("tetris_capacity:fig9", "TTFT at the highest load that the best baseline carries"),
    "tetris.fig10": ("tetris_capacity:fig10", "throughput at each system's critical rate"),
    "tetris.fig11": ("tetris_ablation:fig11", "improvement rates by load, Llama-3 8B"),
    "tetris.fig12": ("tetris_ablation:fig12", "improvement rates by load, Llama-3 70B"),
    "tetris.fig13": ("tetris_ablation:fig13", "what chunks are worth over single-chunk plans"),
    "tetris.fig14": ("tetris_overheads:fig14", "what cache balancing and transfers add"),
    "tetris.table2": ("tetris_overheads:table2", "planning time up to SP 128"),
    "tetris.loongserve": ("tetris_capacity:loongserve", "LoongServe as published beside what Tetris compares with"),
    "tetris.noise": ("tetris_capacity:noise", "30% execution noise: anchored and open-loop time lines"),
    "combined.tetris": ("combined:tetris", "Weave (Tetris outside, Medha inside) and its peers on Tetris's workloads"),
    "combined.azure": ("combined:azure", "the same on PecSched's rewriting of Azure's conversations"),
    "packing-prefetch.fig1": ("packing_prefetch:fig1", "compute against HBM bandwidth, and what is bound by which"),
    "packing-prefetch.slo": ("packing_prefetch:slo", "the TBT limits: 16.70 and 19.23 ms"),
    "packing-prefetch.case1": ("packing_prefetch:case1", "speed-ups over prefill and KV tokens (Fig. 5)"),
    "packing-prefetch.case2": ("packing_prefetch:case2", "speed-ups over the prefetch buffer (Fig. 6)"),
    "packing-prefetch.case3": ("packing_prefetch_service:case3", "requests a second within the SLO (Fig. 7)"),
    "packing-prefetch.case4": ("packing_prefetch_service:case4", "throughput against latency by chunk (Fig. 8)"),
    "pecsched.fig1": ("pecsched_motivation:fig1", "lengths of Azure's requests"),
    "pecsched.fig2": ("pecsched_motivation:fig2", "short requests under FIFO, with and without long ones"),
    "pecsched.fig3": ("pecsched_motivation:fig3", "short requests under reservation and under FIFO"),
    "pecsched.table1": ("pecsched_motivation:table1", "idle share under reservation and under FIFO"),
    "pecsched.table2": ("pecsched_motivation:table2", "long requests that starve under priority"),
    "pecsched.table3": ("pecsched_motivation:table3", "preemptions of long prefills without fast SP"),
    "pecsched.fast-sp": ("pecsched_fast_sp:run", "§5.1, §5.3: what a pause keeps; forms of sequence parallelism"),
    "pecsched.fig9": ("pecsched_overall:fig9", "queueing of short requests against FIFO, reservation, priority"),
    "pecsched.fig10": ("pecsched_overall:fig10", "throughput of short requests"),
    "pecsched.fig11": ("pecsched_overall:fig11", "JCT of long requests"),
    "pecsched.fig12": ("pecsched_overall:fig12", "queueing of short requests, part by part"),
    "pecsched.fig13": ("pecsched_overall:fig13", "throughput of short requests, part by part"),
    "pecsched.fig14": ("pecsched_overall:fig14", "JCT of long requests, part by part"),
    "pecsched.table6": ("pecsched_overall:table6", "suspensions of long requests, part by part"),
    "pecsched.ageing": ("pecsched_ageing:run", "long requests as short ones grow more, with ageing and without"),
    "pecsched.table7": ("pecsched_overhead:table7", "scheduling time over JCT"),
    "pecsched.fig15": ("pecsched_overhead:fig15", "scheduling time to 8,192 GPUs"),
}


def names() -> list[str]:
    """All ids, in the papers' order."""
    return list(EXPERIMENTS)


def experiment(name: str) -> Callable[[RunOptions], ExperimentReport]:
    """The function behind an id; ConfigError names close ids."""
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name, EXPERIMENTS, n=4, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}?" if close else "`headway reproduce --list` shows all"
        raise ConfigError(f"no experiment {name!r}; {hint}")
    module, _, function = EXPERIMENTS[name][0].partition(":")
    found: Callable[[RunOptions], ExperimentReport] = getattr(import_module(f"headway.research.{module}"), function)
    return found
