"""The TTFT-TBT trade-off of 3D parallelism: Medha Figs. 12 and 20, Mnemosyne Figs. 18 and 19.

Arithmetic (Mnemosyne Eq. 9 over fitted latencies), because the simulator has no KV groups. Fig. 20's caption says
p_tp = 4 and p_spp = 4 with 8 KV heads; groups join as the context grows, a shard never holding more than its share.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from headway.experiments.arithmetic import Prefill, latency_source, machine, static_prefill
from headway.experiments.base import MODES, Mode, Options, Panel, Report, Row
from headway.experiments.verdicts import at_most, band, both, judge, order

CHUNKS = (32, 64, 128, 256)
GROUPS = (1, 2, 4)
CONTEXTS = (1_000_000, 2_000_000, 4_000_000)


def _prefill(context: int, chunk: int, groups: int, mode: Mode) -> Prefill:
    return static_prefill(machine("h100", "llama-3-8b", 4, 4, mode), context, chunk, tuple(range(1, groups + 1)))


def point(context: int, chunk: int, groups: int, mode: Mode) -> tuple[float, float]:
    """(TTFT, P95 TBT beside it) of one chunk size and KV degree."""
    found = _prefill(context, chunk, groups, mode)
    m = machine("h100", "llama-3-8b", 4, 4, mode)
    return found.ttft_s, m.through_s(found.percentile_s(95), chunk)


def _trade_rows() -> list[Row]:
    def by_chunk(which: int, mode: Mode) -> dict[str, float]:
        return {str(c): point(1_000_000, c, 1, mode)[which] for c in CHUNKS}

    def by_groups(context: int, chunk: int, which: int, mode: Mode) -> dict[str, float]:
        return {str(k): point(context, chunk, k, mode)[which] for k in GROUPS}

    def small(mode: Mode) -> float:
        found = by_groups(1_000_000, 32, 0, mode)
        return found["4"] / found["1"]

    def large(mode: Mode) -> float:
        found = by_groups(4_000_000, 256, 0, mode)
        return found["4"] / found["1"]

    falls = order("falls", lambda found: _falls(list(found.values())))
    rises = order("rises", lambda found: _falls([-value for value in found.values()]))
    return [
        judge("1M, one KV group: TTFT by chunk, seconds", "falls", falls, both(partial(by_chunk, 0))),
        judge("1M, one KV group: P95 TBT by chunk, seconds", "rises", rises, both(partial(by_chunk, 1))),
        judge("4M, chunk 256: P95 TBT by KV groups, seconds", "falls", falls,
              both(partial(by_groups, 4_000_000, 256, 1))),
        judge("1M, chunk 32: TTFT with 4 KV groups over 1", ">= 1: lower degrees are better here",
              order("at least 1", lambda value: value >= 1.0), both(small)),
        judge("4M, chunk 256: TTFT with 4 KV groups over 1", "< 1", at_most(1.0), both(large)),
    ]  # fmt: skip


def _falls(values: list[float]) -> bool:
    return all(later < earlier for earlier, later in pairwise(values))


def trade(options: Options) -> Report:
    """Medha Fig. 20, Mnemosyne Fig. 18."""
    panels = tuple(
        Panel(
            title=f"{context // 1_000_000}M tokens, default mode",
            x="TTFT, s",
            y="P95 TBT, s",
            lines={f"KVP {k}": [point(context, c, k, "default") for c in CHUNKS] for k in GROUPS},
        )
        for context in CONTEXTS
    )
    machines = [machine("h100", "llama-3-8b", 4, 4, mode) for mode in MODES]
    scenario = "Llama-3 8B, H100, TP4 × 4 stages × 1, 2, 4 KV groups, chunks 32 to 256; arithmetic"
    return Report(source=latency_source(*machines, scenario=scenario), rows=tuple(_trade_rows()), panels=panels)


def fig12(options: Options) -> Report:
    """Medha Fig. 12: 2D (SPP8) against 3D (SPP4, KVP2), 70B, TBT over 2M tokens alone and beside a chunk of 64.

    The figure is a served workload at 1.75 QPS; this is one decode and one chunk over equally long contexts."""
    context = 2_000_000

    def gain(chunk: int, mode: Mode) -> float:
        flat, deep = (machine("h100", "llama-3-70b", 8, stages, mode) for stages in (8, 4))
        past = context if chunk else 0
        return flat.tbt_s(context, chunk, 1, past) / deep.tbt_s(context, chunk, 2, past)

    rows = [
        judge("70B at 2M tokens, decode beside a chunk of 64: TBT of 2D over 3D", "2× and more", band(1.6, 2.6),
              both(partial(gain, 64)), approximate=True),
        judge("70B at 2M tokens, decode alone: TBT of 2D over 3D", "2× and more (workload not alone)", band(1.4, 2.6),
              both(partial(gain, 0)), approximate=True),
    ]  # fmt: skip
    machines = [machine("h100", "llama-3-70b", 8, stages, mode) for stages in (4, 8) for mode in MODES]
    scenario = "Llama-3 70B, 64 H100s: TP8 × 8 stages against TP8 × 4 stages × 2 KV groups; arithmetic, no workload"
    return Report(source=latency_source(*machines, scenario=scenario), rows=tuple(rows))


def timeline(options: Options) -> Report:
    """Mnemosyne Fig. 19: KV groups join while 2M tokens are prefilled (the caption says 8B, the text 70B; both here).

    TP8 × 4 stages, chunks of 256; a group of 32 GPUs joins after each quarter of the prompt."""
    prompt, chunk = 2_000_000, 256
    names = ("llama-3-8b", "llama-3-70b")

    def run(name: str, mode: Mode) -> Prefill:
        return static_prefill(machine("h100", name, 8, 4, mode), prompt, chunk, (1, 2, 3, 4))

    def grown(name: str, mode: Mode) -> float:
        """The slowest iteration of the last quarter over that of the first."""
        seconds = run(name, mode).iterations
        quarter = seconds.size // 4
        return float(seconds[-quarter:].max() / seconds[:quarter].max())

    def without(name: str, mode: Mode) -> float:
        seconds = static_prefill(machine("h100", name, 8, 4, mode), prompt, chunk).iterations
        quarter = seconds.size // 4
        return float(seconds[-quarter:].max() / seconds[:quarter].max())

    rows = [
        judge(
            f"{name}: iterations stay as long as groups join: worst of the last quarter over that of the first",
            "near consistent",
            band(0.75, 1.33),
            both(partial(grown, name)),
            f"Without KV groups: {without(name, 'default'):.1f}× in default mode.",
        )
        for name in names
    ]
    panels = tuple(_timeline_panel(name, run(name, "default"), prompt, chunk) for name in names)
    machines = [machine("h100", name, 8, 4, mode) for name in names for mode in MODES]
    scenario = "2M tokens, TP8 × 4 stages, 1 to 4 KV groups (32 to 128 H100s), chunks of 256; arithmetic"
    return Report(source=latency_source(*machines, scenario=scenario), rows=tuple(rows), panels=panels)


def _timeline_panel(name: str, found: Prefill, prompt: int, chunk: int) -> Panel:
    ends = found.iterations.cumsum()
    step = max(1, ends.size // 100)
    points = [(float(ends[i]), float(32 * (1 + min(3, i * chunk * 4 // prompt)))) for i in range(0, ends.size, step)]
    return Panel(title=name, x="seconds", y="H100s", lines={"participating": points})
