"""`RunningTally.decodes_of` that compares what it kept with a pass over all running requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headway.policy.hosted.driver import RunningTally


def checked_decodes_of(kept: list[bool]) -> Callable[..., tuple[int, int]]:
    """Return the method; `kept` gets for each call whether there was anything to compare."""
    real = RunningTally.decodes_of

    def decodes_of(tally: RunningTally, running: Sequence[Any], recount: bool = False) -> tuple[int, int]:
        decodes = [request for request in running if not request.is_prefill_chunk]
        kept.append(tally._kv_sum is not None)
        counted = real(tally, running, recount)
        assert counted == (len(decodes), sum(request.num_computed_tokens for request in decodes))
        return counted

    return decodes_of
