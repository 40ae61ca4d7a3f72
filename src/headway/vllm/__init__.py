"""Headway's iteration policy as a scheduler plug-in of vLLM.

    vllm serve MODEL --scheduler-cls headway.vllm.Scheduler [--middleware headway.vllm.SloMiddleware]

The same policy objects as in Headway's own engine and simulator decide which prefill advances by how many tokens; vLLM
keeps its block pool, its prefix cache and its `schedule()`. What depends on vLLM's internals is in `scheduler` and is
checked against known versions when the engine starts (`plugin`). vLLM is imported only when `Scheduler` is asked
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.vllm.middleware import SloMiddleware
    from headway.vllm.scheduler import Scheduler

__all__ = ["Scheduler", "SloMiddleware"]


def __getattr__(name: str) -> Any:
    """Import on first use: the middleware runs in a process that needs no scheduler, and nothing here needs vLLM."""
    if name == "Scheduler":
        from headway.vllm.scheduler import Scheduler

        return Scheduler
    if name == "SloMiddleware":
        from headway.vllm.middleware import SloMiddleware

        return SloMiddleware
    raise AttributeError(f"module 'headway.vllm' has no attribute {name!r}")
