"""Counts over a host's running requests, kept from step to step: a pass over all of them is much of a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VllmRequest = Any
"""`vllm.v1.request.Request`, or the simulator's `VllmRequestState`."""


class RunningTally:
    """How many requests decode, and the KV tokens that they read together.

    Counted anew where a change cannot be followed: a decode was preempted, or requests run that the policy does not
    know. Otherwise each step adds what it computes."""

    def __init__(self, decoding: Mapping[str, VllmRequest]) -> None:
        """`decoding`: the decodes that the policy knows, by id; owned and kept by the driver."""
        self._decoding = decoding
        # Prefills that run, by id.
        self.begun: set[str] = set()
        # KV tokens of all decodes; None: count them.
        self._kv_sum: int | None = None

    def decodes_of(self, running: Sequence[VllmRequest], recount: bool = False) -> tuple[int, int]:
        """Return (decodes, their KV tokens) among `running`. `recount`: trust nothing that was kept."""
        known = len(running) == len(self._decoding) + len(self.begun)
        if known and not recount and self._kv_sum is not None:
            return len(self._decoding), self._kv_sum
        cached = [request.num_computed_tokens for request in running if not request.is_prefill_chunk]
        kv_sum = sum(cached)
        # With others among them, what they compute could not be told from the decodes' tokens.
        self._kv_sum = kv_sum if known and len(cached) == len(self._decoding) else None
        return len(cached), kv_sum

    def computed(self, tokens: int) -> None:
        """Add the tokens that the decodes compute in a step."""
        if self._kv_sum is not None:
            self._kv_sum += tokens

    def decoding_from_now(self, name: str) -> None:
        """Count a request, already among the decodes, whose prompt is complete with this step."""
        self.begun.discard(name)
        if self._kv_sum is not None:
            self._kv_sum += self._decoding[name].num_computed_tokens

    def ended(self, name: str) -> None:
        """Take off a request that has ended and is about to leave the decodes, if it is one."""
        self.begun.discard(name)
        if self._kv_sum is not None and name in self._decoding:
            self._kv_sum -= self._decoding[name].num_computed_tokens

    def lost(self, name: str) -> None:
        """Take off a request whose KV is gone: its own count of cached tokens is 0 already."""
        self.begun.discard(name)
        if name in self._decoding:
            self._kv_sum = None

    def forget(self) -> None:
        """Count anew in the next step: requests that the policy does not know may have begun."""
        self._kv_sum = None
