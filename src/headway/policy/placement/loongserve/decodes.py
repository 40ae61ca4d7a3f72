"""Decode batches: who decodes where, and how much KV that takes. A batch is fixed when its prefill ends (Tetris §2.4);
it only grows when it must be merged with another one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.core.request import Request

UNLIMITED = 1 << 60


class DecodeBatch:
    """`members`: requests and when they began to decode; `moving`: of those, whose KV is on its way to `group`;
    `paused`: their instances compute a prefill."""

    __slots__ = ("group", "members", "moving", "paused")

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group
        self.members: dict[str, tuple[Request, float]] = {}
        self.moving: set[str] = set()
        self.paused = False

    def made(self, name: str, now: float, step_s: float) -> int:
        """Output tokens that a member is taken to have."""
        request, since_s = self.members[name]
        return min(request.max_output_tokens, 1 + int((now - since_s) / step_s))

    def tokens(self, now: float, step_s: float, ahead: int = 0) -> int:
        """KV that they take, `ahead` steps from now."""
        return sum(
            request.prompt_tokens + min(request.max_output_tokens, self.made(name, now, step_s) + ahead)
            for name, (request, _) in self.members.items()
        )

    @property
    def reserve(self) -> int:
        """KV that they take in the end."""
        return reserve_of(request for request, _ in self.members.values())


def reserve_of(requests: Iterable[Request]) -> int:
    """KV tokens of prompts with all of their output."""
    return sum(request.prompt_tokens + request.max_output_tokens for request in requests)


def room_of(capacities: Sequence[int]) -> int:
    """KV tokens that instances hold together; one whose capacity is not stated holds anything."""
    return sum(capacity or UNLIMITED for capacity in capacities)
