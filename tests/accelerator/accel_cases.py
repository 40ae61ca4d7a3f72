"""Settings and stages for tests: the paper's, and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from headway.perf.hardware import MODELS, model
from headway_research.accelerator.machine import (
    BYTES,
    MACHINES,
    IterationWork,
    OperandTypes,
    TechniqueSet,
    assumptions,
    machine,
)
from headway_research.accelerator.operators import OperatorSetting


def study(preset: str = "default", name: str = "llama-3.1-8b", on: str = "tpuv6e") -> OperatorSetting:
    return OperatorSetting(model(name), machine(on), assumed=assumptions(preset))


@st.composite
def settings_of(draw: st.DrawFn) -> OperatorSetting:
    """Any model on any machine, with buffers and bandwidth of their own, any precision and techniques."""
    base = machine(draw(st.sampled_from(sorted(MACHINES))))
    on = base.with_(
        compute_bytes=int(base.compute_bytes * draw(st.sampled_from((0.5, 1.0, 2.0)))),
        prefetch_bytes=draw(st.sampled_from((0, 1 << 20, 1 << 26, 1 << 28, 1 << 30))),
        bandwidth=base.bandwidth * draw(st.sampled_from((0.3, 1.0, 3.0))),
    )
    assumed = assumptions(
        draw(st.sampled_from(("paper", "default"))),
        across_iterations=draw(st.booleans()),
        prefetch_in_attention=draw(st.booleans()),
        ahead_bytes=draw(st.sampled_from((0, 4 << 20))),
        decode_attention=draw(st.sampled_from(("vector", "array", "fastest"))),
    )
    kinds = st.sampled_from(sorted(BYTES))
    precision = OperandTypes(weights=draw(kinds), kv=draw(kinds))
    techniques = TechniqueSet(
        flash_attention=draw(st.booleans()),
        fusion=draw(st.sampled_from(("auto", "off"))),
        double_buffering=draw(st.booleans()),
    )
    return OperatorSetting(model(draw(st.sampled_from(sorted(MODELS)))), on, precision, assumed, techniques)


@st.composite
def works(draw: st.DrawFn) -> IterationWork:
    """A chunk, a decode batch, or both."""
    prefill = draw(st.sampled_from((0, 1, 16, 100, 128, 512, 1000, 2048, 8192)))
    decodes = draw(st.sampled_from((0, 1, 8, 32, 200) if prefill else (1, 8, 32, 200)))
    return IterationWork(
        prefill_tokens=prefill,
        prefill_past=draw(st.sampled_from((0, 1000, 100_000))) if prefill else 0,
        decodes=decodes,
        kv_tokens=decodes * draw(st.sampled_from((1, 100, 4096))),
    )
