"""PecSched §5.1 and §5.3: what a pause keeps, and which of four combinations fast SP chooses, by the corrected formulas
(`perf.latency.fast_sp`, which Headway uses) and by the printed ones.

Departures of the printed formulas from the computation and communication of the two forms:

1. Megatron's attention, 4 (s T)² d / T, is one step of its ring: the G / T steps over the node's TP regions are
   missing, while Ulysses' 4 (s G)² d / G covers the node. Both attend to the same pairs: the totals must be equal.
2. Megatron's QKV product has a 1 / T too many: a region multiplies s T tokens with 1 / T of the weights.
3. QKV products and weights count N_h + N_kv heads; keys and values are both N_kv.
4. The MLP is 4 d wide with two matrices (8 d², 16 s d²); the models of Table 5 are gated with their own widths: 3 d ff.
5. No causal half, and no factor for the ring between nodes.
6. Volumes are elements of a whole node, taken over one link here; each of the G accelerators has its own.
7. §4.2 describes Megatron under Ulysses' name and the reverse (the formulas have them right).

Ring hops between nodes are not in the formulas at all.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.perf.hardware import ModelShape, accelerator, model
from headway.perf.latency import fast_sp
from headway.perf.latency.fast_sp import FORMS, AcceleratorGroup, Form, SpPlan, SpRates
from headway.sim.report.page import ReportChart
from headway_research.base import ClaimRow, ExperimentReport, RunOptions, source
from headway_research.pecsched.setting import MODELS
from headway_research.verdicts import at_least, band, judge, only, order

LENGTHS = (8_192, 32_768, 100_000, 250_000, 500_000)
GPUS = 32


def attention_flops(form: Form, shape: ModelShape, group: AcceleratorGroup, tokens: int) -> float:
    """Return the printed FLOPs of one accelerator and layer for attention with its projections."""
    s, d, t, g = tokens / group.accelerators, shape.hidden, group.tp, group.in_node
    heads = (shape.q_heads + shape.kv_heads) * shape.head_dim
    if form == "megatron":
        return 2 * s * d * heads / t + 4 * (s * t) ** 2 * d / t + 2 * s * d * d
    return 2 * s * d * heads + 4 * (s * g) ** 2 * d / g + 2 * s * d * d


def attention_elements(form: Form, shape: ModelShape, group: AcceleratorGroup, tokens: int) -> float:
    """Return the printed number of elements that a node communicates in one layer's attention."""
    s, d, t, g = tokens / group.accelerators, shape.hidden, group.tp, group.in_node
    heads = (shape.q_heads + shape.kv_heads) * shape.head_dim
    if form == "megatron":
        return 2 * s * d * (t - 1) * g
    return 2 * s * heads * (g - 1) + (d * heads + d * d) * g * (t - 1) / t


def mlp_flops(shape: ModelShape, group: AcceleratorGroup, tokens: int) -> float:
    """Return the printed FLOPs of one accelerator and layer for the MLP."""
    return 16 * tokens / group.accelerators * shape.hidden**2


def mlp_elements(form: Form, shape: ModelShape, group: AcceleratorGroup, tokens: int) -> float:
    """Return the printed number of elements that a node communicates in one layer's MLP."""
    s, d, t, g = tokens / group.accelerators, shape.hidden, group.tp, group.in_node
    return 2 * s * d * (t - 1) * g if form == "megatron" else 8 * d * d * (t - 1) * g / t


def printed_plans(shape: ModelShape, rates: SpRates, group: AcceleratorGroup, tokens: int) -> Iterator[SpPlan]:
    """Yield all four combinations, with seconds from the printed FLOPs and volumes."""
    # Seconds per element over one link: the paper's volumes are a whole node's (fault 6 above).
    link_s = shape.dtype_bytes / (rates.inside.bytes_per_s * rates.inside.efficiency)
    for attn in FORMS:
        for mlp in FORMS:
            flops = attention_flops(attn, shape, group, tokens) + mlp_flops(shape, group, tokens)
            moved = attention_elements(attn, shape, group, tokens) + mlp_elements(mlp, shape, group, tokens)
            exposed_s = shape.layers * moved * link_s
            yield SpPlan(attn, mlp, shape.layers * flops / rates.linear_flops + exposed_s, exposed_s)


def printed_fastest(shape: ModelShape, rates: SpRates, group: AcceleratorGroup, tokens: int) -> SpPlan:
    """Return the combination that is fastest by the printed formulas."""
    return min(printed_plans(shape, rates, group, tokens), key=lambda plan: plan.seconds)


class SpPlans:
    """What fast SP chooses at 500K tokens on all 32 GPUs, by model."""

    def __init__(self) -> None:
        self.rates = SpRates.of(accelerator("a100"), 400.0)
        self.groups = {name: AcceleratorGroup(GPUS // at.tp, GPUS // 8, at.tp) for name, at in MODELS.items()}
        shapes = {name: model(at.model) for name, at in MODELS.items()}
        setting = {name: (shapes[name], self.rates, self.groups[name], LENGTHS[-1]) for name in MODELS}
        chosen = {name: fast_sp.fastest(*at) for name, at in setting.items()}
        self.chosen = {name: _forms(plan) for name, plan in chosen.items()}
        self.printed = {name: _forms(printed_fastest(*at)) for name, at in setting.items()}
        self.ring_over_chosen = {
            name: fast_sp.plain_ring(*at).seconds / chosen[name].seconds for name, at in setting.items()
        }
        saved = {name: fast_sp.saved_bytes(shape, 1000, shape.layers) for name, shape in shapes.items()}
        self.state_over_kv = {name: rest / kv for name, (kv, rest) in saved.items()}


def run(options: RunOptions) -> ExperimentReport:
    """All 32 GPUs of the cluster; corrected formulas in default mode, printed ones in paper mode."""
    plans = SpPlans()
    panels = tuple(
        ReportChart(
            title=f"Prefill on 32 A100, {name}",
            x="tokens",
            y="seconds",
            log_x=True,
            log_y=True,
            lines=_lines(name, plans.rates, plans.groups[name]),
        )
        for name in MODELS
    )
    latency = "derived: fast-SP formulas at 0.7 (products) and 0.6 (attention) of an A100's peak"
    origin = source(latency, "32 A100 on four nodes, 400 Gb/s a node", window_s=0.0)
    return ExperimentReport(source=origin, rows=_rows(plans), panels=panels)


def _rows(plans: SpPlans) -> tuple[ClaimRow, ...]:
    return (
        judge(
            "State of a paused prefill beside its KV, over all KV of the prompt",
            "usually less than 5%",
            order("less than 5% for every model", lambda found: max(found.values()) < 0.05),
            only("default", plans.state_over_kv),
            "d / (2 N_kv d_h layers): one layer's activations. Of the KV computed so far it is more.",
        ),
        judge(
            "Forms (attention + MLP) at 500K tokens on 32 GPUs",
            "the fastest of four",
            order("Ulysses attention for every model", lambda found: all(v[0] == "u" for v in found.values())),
            {"paper": plans.printed, "default": plans.chosen},
            "The printed formulas leave out G / T of Megatron's attention, and choose it always. Without tensor "
            "parallelism both forms of the MLP are the same.",
        ),
        judge(
            "Prefill time of plain ring attention over fast SP, 500K tokens on 32 GPUs",
            "1.39 to 1.55 (JCT without fast SP, Fig. 14)",
            order("within 1.39 to 1.55 for every model", lambda found: band(1.39, 1.55)(min(found.values()))),
            only("default", plans.ring_over_chosen),
            "All of it is what attention's kernels lose in a ring: 6.1% a doubling, as measured on eight A100.",
        ),
        judge(
            "Prefill time of plain ring attention over fast SP, the least of the models",
            "above 1",
            at_least(1.0),
            only("default", min(plans.ring_over_chosen.values())),
        ),
    )


def _forms(plan: SpPlan) -> str:
    return f"{plan.attn} + {plan.mlp}"


def _lines(name: str, rates: SpRates, group: AcceleratorGroup) -> dict[str, list[tuple[float, float]]]:
    shape = model(MODELS[name].model)
    lines: dict[str, list[tuple[float, float]]] = {}
    for tokens in LENGTHS:
        for plan in fast_sp.plans(shape, rates, group, tokens):
            lines.setdefault(_forms(plan), []).append((tokens, plan.seconds))
    return lines
