"""Headway: chats and million-token documents from one model, exactly, without one waiting behind the other.

The Python API is imported lazily: `import headway` loads nothing else, and only `LLM` brings torch.
"""

from importlib import import_module

__version__ = "0.1.0"

# Where each public name lives; `__init__.pyi` says the same to type checkers.
_PUBLIC = {
    "BatchLoad": "headway.perf.latency.base",
    "BlockManager": "headway.kv.block_manager",
    "ChunkSize": "headway.api.sizing",
    "Completion": "headway.api.llm",
    "LLM": "headway.api.llm",
    "Request": "headway.core.request",
    "RequestProgress": "headway.core.batch",
    "SamplingParams": "headway.core.request",
    "Scenario": "headway.sim.scenario",
    "Scheduler": "headway.policy.iteration.scheduler",
    "SchedulerConfig": "headway.policy.iteration.config",
    "SimulationResult": "headway.api.simulation",
    "Slo": "headway.core.request",
    "Span": "headway.core.request",
    "chunk_size": "headway.api.sizing",
    "fitted_latency": "headway.api.sizing",
    "load_scenario": "headway.api.simulation",
    "measured_latency": "headway.api.sizing",
    "simulate": "headway.api.simulation",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'headway' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
