"""Registry of experiments by id, in the papers' order: function, title and cost."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from typing import NamedTuple

from headway.core.errors import ConfigError
from headway_research.base import ExperimentReport, RunOptions
from headway_research.recorded import RecordedRun, in_words, recorded, totals


class ExperimentEntry(NamedTuple):
    """One line of `headway reproduce --list`."""

    function: str
    """Module of `headway_research` and function, as module:function; imported when it is chosen."""
    cost: str
    """CPU time in full (not `--quick`): `sec`, up to about one minute; `min`, that or more for each seed."""
    title: str


_TABLE = """
medha.worked-example  medha.worked_example:run sec §4.1: three requests under every policy
medha.eq1             medha.counts:eq1 sec Eq. 1: arithmetic intensity of a chunk; 40 tokens fill an H100
medha.fig1            medha.loads:fig1 min TTFT as the share of long requests grows from 0 to 5%
medha.fig3b           medha.lone_prefill:attention_medha sec attention time of a 1M prefill by chunk size
medha.fig4            medha.lone_prefill:front_medha sec static against adaptive chunks: TTFT over the worst iteration
medha.fig5b           medha.pipelines:against_medha sec stream pipeline against context parallelism, 1M tokens
medha.fig7            medha.kvp:fig7 sec KV parallelism: decode alone and beside a chunk
medha.fig9            medha.loads:fig9 min TTFT over the rate, chats alone and with 5% long requests
medha.fig10           medha.loads:fig10 min decode latency over the rate
medha.fig11           medha.fig11:fig11 min 2D against 3D parallelism: TTFT over the rate, to 2M tokens
medha.fig12           medha.fig11:fig12 min 2D against 3D parallelism: decode latency at a high rate
medha.fig13           medha.fig13:run min FCFS, EDF, LRS, SRPT, LARS; multi-prefill batching on and off
medha.fig14           medha.loads:fig14 min LoongServe with and without a pool for short prompts
medha.fig15           medha.pipelines:mfu_figure sec MFU of prefills, to 128 GPUs
medha.fig16           medha.pipelines:mbu_figure sec MBU of decodes with KV parallelism
medha.fig17           medha.pipelines:prefill sec prefill scaling to 128 GPUs and 10M tokens; where memory ends
medha.fig18           medha.pipelines:decode sec decode latency as stages are added
medha.fig19           medha.kvp:fig19 sec KV parallelism in decode-only batches
medha.fig20           medha.kvp:trade sec TTFT against TBT by chunk and KV groups
medha.deadlines       medha.fig13:deadlines min what hangs on the deadline that the paper leaves open
medha.headlines       medha.headlines:run min 5.7× throughput, 5× capacity, 250 ms at chunks of 512

mnemosyne.fig1       medha.pipelines:overview               sec up to 10M tokens on 128 GPUs
mnemosyne.fig5       medha.counts:mnemosyne_fig5            sec resources for 30 s TTFT and 20 ms TBT
mnemosyne.fig7       medha.lone_prefill:attention_mnemosyne sec attention time of a 1M prefill by chunk size
mnemosyne.fig8       medha.lone_prefill:front_mnemosyne     sec static against adaptive chunks; 1.75× at chunks of 32
mnemosyne.fig13      medha.lone_prefill:against_vllm        sec tensor parallelism alone against vLLM as contexts grow
mnemosyne.fig14      medha.pipelines:against_mnemosyne      sec striped attention against SPP: latency and preemption
mnemosyne.fig15      medha.pipelines:prefill                sec prefill scaling to 128 GPUs and 10M tokens
mnemosyne.fig16      medha.pipelines:decode                 sec decode latency as stages are added
mnemosyne.fig17      medha.kvp:fig17                 sec KV parallelism in decode
mnemosyne.fig18      medha.kvp:trade               sec TTFT against TBT by chunk and KV groups
mnemosyne.fig19      medha.kvp:timeline            sec KV groups join as a prefill grows
mnemosyne.fig22      medha.lone_prefill:beside_decodes      sec decodes beside a chunk: batch time
mnemosyne.headlines  medha.counts:mnemosyne_headlines       sec 1.75×, 30 ms TBT at 10M, 30 s TTFT at 2M
mnemosyne.amdahl     medha.kvp:amdahl                sec KV parallelism as Amdahl's law with 4 : 1

tetris.worked-examples   tetris.examples:worked            sec §2.4's examples from Table 1's cells
tetris.table1            tetris.examples:table1            sec Eq. (1) fitted to Table 1
tetris.fig2              tetris.overheads:fig2             sec decode latency by TP, and by SP × TP on eight GPUs
tetris.fig8              tetris.capacity:fig8              min TTFT over the rate, and how much load each system carries
tetris.fig9              tetris.capacity:fig9              min TTFT at the highest load that the best baseline carries
tetris.fig10             tetris.capacity:fig10             min throughput at each system's critical rate
tetris.fig11             tetris.capacity:fig11             min improvement rates by load, Llama-3 8B
tetris.fig12             tetris.capacity:fig12             min improvement rates by load, Llama-3 70B
tetris.fig13             tetris.capacity:fig13             min what chunks are worth over single-chunk plans
tetris.chunking-bound    tetris.chunking_bound:run         sec how much chunks can gain at all, by Eq. (1)
tetris.fig14             tetris.overheads:fig14            sec what cache balancing and transfers add
tetris.table2            tetris.overheads:table2           sec planning time up to SP 128
tetris.loongserve        tetris.capacity:loongserve        min LoongServe as published beside what Tetris compares with
tetris.loongserve-times  tetris.overheads:loongserve_times sec LoongServe's published times beside the simulator's
tetris.noise             tetris.capacity:noise             min 30% execution noise: anchored and open-loop time lines

combined.tetris  combined.comparison:tetris min The ladder and the placements of papers on Tetris's workloads
combined.azure   combined.comparison:azure  min the same on PecSched's rewriting of Azure's conversations

packing-prefetch.fig1         accelerator.stage_figures:fig1    sec compute against HBM bandwidth, what bounds
packing-prefetch.slo          accelerator.stage_figures:slo     sec the TBT limits: 16.70 and 19.23 ms
packing-prefetch.case1        accelerator.stage_figures:case1   sec speed-ups over prefill and KV tokens (Fig. 5)
packing-prefetch.case2        accelerator.stage_figures:case2   sec speed-ups over the prefetch buffer (Fig. 6)
packing-prefetch.case3        accelerator.service_figures:case3 min requests a second within the SLO (Fig. 7)
packing-prefetch.case4        accelerator.service_figures:case4 min throughput against latency by chunk (Fig. 8)
packing-prefetch.sensitivity  accelerator.service_figures:sensitivity min gains of both over what the paper leaves open

pecsched.fig1       pecsched.figures:fig1      sec lengths of Azure's requests
pecsched.fig2       pecsched.figures:fig2      min short requests under FIFO, with and without long ones
pecsched.fig3       pecsched.figures:fig3      min short requests under reservation and under FIFO
pecsched.table1     pecsched.figures:table1    min idle share under reservation and under FIFO
pecsched.table2     pecsched.figures:table2    min long requests that starve under priority
pecsched.table3     pecsched.figures:table3    min preemptions of long prefills without fast SP
pecsched.fast-sp    pecsched.fast_sp:run       sec §5.1, §5.3: what a pause keeps; forms of sequence parallelism
pecsched.fig9       pecsched.figures:fig9      min queueing of short requests against FIFO, reservation, priority
pecsched.fig10      pecsched.figures:fig10     min throughput of short requests
pecsched.fig11      pecsched.figures:fig11     min JCT of long requests
pecsched.fig12      pecsched.figures:fig12     min queueing of short requests, part by part
pecsched.fig13      pecsched.figures:fig13     min throughput of short requests, part by part
pecsched.fig14      pecsched.figures:fig14     min JCT of long requests, part by part
pecsched.table6     pecsched.figures:table6    min suspensions of long requests, part by part
pecsched.headlines  pecsched.figures:headlines min P99 queueing −92%, throughput +595%, long JCT
pecsched.table7     pecsched.overhead:table7   min scheduling time over JCT
pecsched.fig15      pecsched.overhead:fig15    min scheduling time to 8,192 GPUs
"""
EXPERIMENTS: dict[str, ExperimentEntry] = {
    name: ExperimentEntry(function, cost, title)
    for name, function, cost, title in (line.split(maxsplit=3) for line in _TABLE.split("\n") if line)
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
