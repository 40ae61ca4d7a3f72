"""Decode batches: their requests, instances and KV. A batch is fixed when its prefill ends (Tetris §2.4); it only grows
when it must be merged with another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.core.request import Request

UNLIMITED = 1 << 60


class DecodeBatch:
    """Requests that decode on one group."""

    __slots__ = ("group", "members", "migrating", "paused")

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group
        self.members: dict[str, tuple[Request, float]] = {}  # with the time at which each began to decode
        self.migrating: set[str] = set()  # members whose KV is on its way to `group`
        self.paused = False  # the instances compute a prefill

    def generated(self, name: str, now: float, step_s: float) -> int:
        """Return the output tokens that a member is assumed to have: one each `step_s`."""
        request, since_s = self.members[name]
        # the first token comes with the prefill
        return min(request.max_output_tokens, 1 + int((now - since_s) / step_s))

    def tokens(self, now: float, step_s: float, ahead: int = 0) -> int:
        """Return the KV tokens of all members, `ahead` steps from now."""
        return sum(
            request.prompt_tokens + min(request.max_output_tokens, self.generated(name, now, step_s) + ahead)
            for name, (request, _) in self.members.items()
        )

    @property
    def final_tokens(self) -> int:
        """KV tokens of all members with all of their output."""
        return final_tokens_of(request for request, _ in self.members.values())


def final_tokens_of(requests: Iterable[Request]) -> int:
    """Return the KV tokens of requests with all of their output."""
    return sum(request.prompt_tokens + request.max_output_tokens for request in requests)


def capacity_of(capacities: Sequence[int]) -> int:
    """Return the KV tokens that instances hold together; one whose capacity is not stated holds `UNLIMITED`."""
    return sum(capacity or UNLIMITED for capacity in capacities)
