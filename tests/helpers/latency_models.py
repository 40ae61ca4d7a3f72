"""Latency models for tests: a roofline of a real shape, and random tables."""

from __future__ import annotations

from hypothesis import strategies as st

from headway.perf.hardware import ModelShape
from headway.perf.latency.base import BatchLoad, LatencyModel, solve_tokens
from headway.perf.latency.table import MachineRates, TableLatency, TableSource, roofline

SHAPE = ModelShape(layers=32, hidden=4096, q_heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256)
RATES = MachineRates(linear_flops=4e14, attention_flops=3.5e14, bandwidth=2.8e12, fixed_s=1e-3)


def gpu_roofline(**rates: float) -> TableLatency:
    """Llama-3-8B on something like an H100."""
    values = {name: getattr(RATES, name) for name in ("linear_flops", "attention_flops", "bandwidth", "fixed_s")}
    return roofline(SHAPE, MachineRates(**(values | rates)))


def table(
    tokens: list[tuple[int, float]], chunks: list[tuple[int, float, float]], decode: tuple[float, float, float]
) -> TableLatency:
    source = TableSource(fingerprint="", provenance="test", tokens=tuple(tokens), chunks=tuple(chunks), decode=decode)
    return TableLatency(source)


@st.composite
def tables(draw: st.DrawFn) -> TableLatency:
    """Rising tables with staircases in them: a step of rows may take up to 30% less than the one before."""
    at, seconds, knots = 0, draw(st.floats(1e-4, 5e-3)), []
    for _ in range(draw(st.integers(2, 12))):
        knots.append((at, seconds))
        at += draw(st.integers(1, 60))
        seconds *= draw(st.floats(0.95, 1.6))
    chunks, past_s = [(0, 0.0, 0.0)], 0.0
    for size in sorted(draw(st.sets(st.integers(1, 400), min_size=1, max_size=6))):
        past_s += draw(st.floats(0, 2e-7))
        chunks.append((size, size * draw(st.floats(0, 5e-6)), past_s))
    decode = (draw(st.floats(0, 1e-3)), draw(st.floats(0, 1e-4)), draw(st.floats(0, 1e-7)))
    return table(knots, chunks, decode)


def literal_prefill_s(model: LatencyModel, tokens: int, t_target_s: float, min_chunk: int) -> float:
    """Medha's Algorithm 3, SIMULATEPREFILL, step by step, with a minimum chunk in place of its `break`."""
    total_s, done = 0.0, 0
    while done < tokens:
        chunk, _ = solve_tokens(model, BatchLoad(), done, tokens - done, t_target_s)
        chunk = max(chunk, min(min_chunk, tokens - done))
        total_s += float(model.token_s(chunk, chunk)[0]) + model.attention_s(done, chunk)
        done += chunk
    return total_s
