"""Chunks up to the size of a CUDA graph: the rows that vLLM would pad a step with are computed for a prompt instead."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from headway.policy.hosted.driver import StepPlan
from headway.policy.iteration.prefill import PrefillState

_MOST_ROWS = 16
"""Rows that are filled: the distance of vLLM's own sizes. Beyond it attention to a long history would not be free."""


def fill_graph(plan: StepPlan, sizes: Sequence[int], states: Mapping[str, PrefillState]) -> StepPlan:
    """Return a plan whose cut prefills, most urgent first, also get the rows up to the next of `sizes`.

    `sizes`: tokens of the captured graphs, ascending; larger steps run without one, and stay as they are. `states`: of
    the prefills that have quotas."""
    place = bisect_left(sizes, plan.load.tokens)
    spare = min(sizes[place] - plan.load.tokens, _MOST_ROWS) if place < len(sizes) else 0
    filled = dict(plan.quotas)
    for name, tokens in plan.quotas.items():
        more = min(spare, states[name].remaining - tokens)
        filled[name] += more
        spare -= more
    return replace(plan, quotas=filled)
