"""Cached prefixes in placement decisions: what a prompt takes behind what an instance has cached, and whether cached KV
of another instance is copied or computed again.

A prefix's KV is copied over the link between the two instances while the request waits for its turn; attention reads it
like any other past, so that prefill times take it as history.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from pydantic import model_validator

from headway.core.request import Request
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.contract import CachedPrefix, ClusterSnapshot
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


def copy_pays(copy_s: float, recompute_s: float) -> bool:
    """Return whether to copy cached KV that takes `copy_s` to move, and `recompute_s` to compute again where it is
    needed."""
    return copy_s < recompute_s


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
        if copy_pays(copy_s, own_s - longest_s):
            return PrefixStart(CachedPrefix(longest.instance, longest.tokens, copy_s), copy_s + longest_s)
    return PrefixStart(CachedPrefix(instance, own) if own else None, own_s)
