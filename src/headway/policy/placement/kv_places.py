"""KV in placement decisions: what a prompt takes behind what an instance has cached, whether cached KV of another
instance is copied or computed again, and where a request decodes once it is prefilled.

A prefix's KV is copied over the link between the two instances while the request waits for its turn; attention reads it
like any other past, so that prefill times take it as history.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from pydantic import model_validator

from headway.core.request import Request
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.contract import (
    Action,
    CachedPrefix,
    ClusterSnapshot,
    EnqueueRequest,
    Event,
    KvReady,
    RequestDropped,
    RequestFinished,
    SpanDone,
    TransferKv,
    final_tokens,
    members_for,
)
from headway.policy.placement.registry import PolicyContext, PolicyOptions

_ALONE = GroupShape(1)


class AffinityOptions(PolicyOptions):
    """Settings of policies that see hits."""

    affinity: bool = False
    """Whether plans count the uncached part of a prompt only: it goes where its prefix is cached if that is sooner, and
    a prefix that another instance has is copied where that is faster than computing it again. Live, a prompt begins
    behind a prefix only on the instance that has it, or on a group with that instance."""

    @model_validator(mode="after")
    def _no_paper_has_it(self) -> Self:
        if self.affinity and self.mode == "paper":
            raise ValueError("`affinity` is in no paper: leave it out, or `mode: paper`")
        return self


class PrefixStart(NamedTuple):
    """The cheapest way to begin a prompt on an instance."""

    prefix: CachedPrefix | None
    """None: nothing of it is cached there, and no copy is worth its time."""
    seconds: float
    """Predicted time of the copy and of the tokens behind it, alone on the instance."""

    @property
    def tokens(self) -> int:
        """Tokens that are not computed."""
        return self.prefix.tokens if self.prefix is not None else 0


def copy_seconds(
    tokens: int, source: int, group: Sequence[int], view: ClusterSnapshot, context: PolicyContext
) -> float:
    """Return the seconds to copy the KV of `tokens` tokens from an instance to a group, spread over the group.

    Members of the group keep their own share. The source sends to one after another, with the network cards of all its
    accelerators; the slowest link counts for all."""
    others = [i for i in group if i != source]
    if not tokens or not others:
        return 0.0
    instances = view.instances
    sent = tokens * context.shape.kv_bytes_per_token * len(others) // len(group) // instances[source].tp
    return max(view.links.between(instances[source], instances[i]).transfer_s(sent) for i in others)


def longest_prefix(cached: Sequence[int], among: Sequence[int] | None = None) -> CachedPrefix | None:
    """Return the longest cached prefix of a prompt, ties to the lower id; None: no instance has any of it.

    cached: tokens by instance (`RequestArrived.cached`). among: instances to look at; None: all."""
    most, first = max(
        ((cached[i], -i) for i in (range(len(cached)) if among is None else among) if cached), default=(0, 0)
    )
    return CachedPrefix(-first, most) if most else None


def cheapest_start(
    request: Request, cached: Sequence[int], instance: int, view: ClusterSnapshot, context: PolicyContext
) -> PrefixStart:
    """Return how a prompt begins on an instance: behind what is cached there, or behind a copy of the longest cached
    prefix where that is faster than to compute the difference."""

    def rest_s(past: int) -> float:
        return context.latency.prefill_s(past, max(1, request.prompt_tokens - past), _ALONE)

    own = cached[instance] if cached else 0
    own_s = rest_s(own)
    longest = longest_prefix(cached) if context.copies_prefixes else None
    if longest is not None and longest.tokens > own:
        copy_s = copy_seconds(longest.tokens - own, longest.instance, (instance,), view, context)
        longest_s = rest_s(longest.tokens)
        if copy_s < own_s - longest_s:
            return PrefixStart(CachedPrefix(longest.instance, longest.tokens, copy_s), copy_s + longest_s)
    return PrefixStart(CachedPrefix(instance, own) if own else None, own_s)


# Decode instances by freeness with virtual usage (Tetris §5.2, Llumnix), where prefill is disaggregated.
#
# The decode instance is chosen when the prefill is placed, so that KV can be sent there as it is computed. Freeness is
# free slots over running requests; slots of requests whose KV is still on its way count as used (virtual usage).


def decode_instances(view: ClusterSnapshot, tokens: int) -> tuple[int, ...]:
    """Return the decode instances whose pools hold a request of so many tokens, output included."""
    return tuple(i for i in view.with_role("decode") if members_for(tokens, view.instances[i].capacity) == 1)


class DecodePlacement:
    """Decode instances of requests, for policies that place prefills. Where a cluster has no decode instances, requests
    decode on the group of their last span."""

    def __init__(self) -> None:
        self._reserved: dict[str, tuple[int, int]] = {}  # request: decode instance, tokens of virtual usage
        self._virtual_usage: dict[int, int] = {}  # tokens whose KV is on its way, by instance
        self._groups: dict[str, tuple[int, ...]] = {}  # of requests that decode where they were prefilled

    def choose(self, view: ClusterSnapshot, tokens: int = 1) -> int | None:
        """Return the decode instance with the most freeness, ties to the lower id; None where none has a pool for so
        many tokens."""
        best, most = None, -float("inf")
        for i in decode_instances(view, tokens):
            freeness = self.freeness(view, i)
            if freeness > most:
                # ids ascend: a later instance must be freer, not just as free
                best, most = i, freeness
        return best

    def freeness(self, view: ClusterSnapshot, instance: int) -> float:
        """Return free slots, less virtual usage, per running request."""
        return self.room(view, instance) / max(1, view.instances[instance].running)

    def virtual_usage(self, instance: int) -> int:
        """Return the tokens of requests that will decode on an instance, and whose KV is not there yet."""
        return self._virtual_usage.get(instance, 0)

    def reserved(self, requests: Iterable[str]) -> Counter[int]:
        """Return how many of these tokens are of the named requests, by instance."""
        found = Counter[int]()
        for request in requests:
            target, tokens = self._reserved.get(request, (-1, 0))
            found[target] += tokens
        return found

    def room(self, view: ClusterSnapshot, instance: int) -> int:
        """Return free slots, less virtual usage."""
        known = view.instances[instance]
        return known.capacity - known.used - self._virtual_usage.get(instance, 0)

    def place(
        self, request: Request, groups: Sequence[tuple[int, ...]], view: ClusterSnapshot, target: int | None = None
    ) -> list[Action]:
        """Choose the decode instance of a request whose prefill is to be committed on `groups`, one a span, unless
        `target` is that; return the transfers of its spans. A request that no decode instance's pool holds decodes on
        its last group, over the KV there."""
        if request.max_output_tokens <= 1:
            return []
        target = self.choose(view, final_tokens(request)) if target is None else target
        if target is None:
            self._groups[request.id] = groups[-1]
            return []
        self._reserved[request.id] = (target, request.prompt_tokens)
        # until the KV has arrived the instance's own `used` does not show it
        self._virtual_usage[target] = self._virtual_usage.get(target, 0) + request.prompt_tokens
        # one transfer a span: KV is sent as each chunk is computed
        return [TransferKv(request.id, target, index) for index in range(len(groups))]

    def prefilled(self, request: str) -> list[Action]:
        """Return the transfer of a complete prompt whose spans' transfers were not asked for: its instance sent the KV
        while it was computed; or its decode where it was prefilled."""
        target, _ = self._reserved.get(request, (-1, 0))
        if target >= 0:
            return [TransferKv(request, target, overlapped=True)]
        group = self._groups.pop(request, None)
        return [] if group is None else [EnqueueRequest(request, group, "decode", concurrent=True)]

    def withdraw(self, request: str) -> None:
        """Forget a request: its KV has arrived, it has ended, or its prefill was not committed after all."""
        self._groups.pop(request, None)
        target, tokens = self._reserved.pop(request, (-1, 0))
        if target >= 0:
            self._virtual_usage[target] -= tokens

    def on_event(self, event: Event) -> list[Action]:
        """Return the actions for an event that concerns decodes; none for others."""
        if isinstance(event, KvReady):
            # from now on the scheduler's own `used` counts it: not twice
            self.withdraw(event.request)
            return [EnqueueRequest(event.request, (event.instance,), "decode")]
        if isinstance(event, SpanDone) and event.last:
            group = self._groups.pop(event.request, None)
            return [] if group is None else [EnqueueRequest(event.request, group, "decode")]
        if isinstance(event, RequestFinished | RequestDropped):
            self.withdraw(event.request)
        return []
