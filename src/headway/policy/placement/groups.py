"""Choice of a group of instances: inside one node where possible, else whole nodes, by when they are free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.core.span import Span, Strategy
from headway.policy.placement.base import CommitSpans
from headway.policy.placement.view import ClusterSnapshot


def prefill_instances(view: ClusterSnapshot, policy: str) -> tuple[int, ...]:
    """Return ids of the instances that prefill. Raises ConfigError, with the policy's name, where there are none."""
    instances = view.with_role("mixed", "prefill")
    if not instances:
        raise ConfigError(f"{policy} needs at least one instance of role mixed or prefill")
    return instances


def by_free_time(view: ClusterSnapshot, candidates: Iterable[int]) -> dict[int, list[int]]:
    """Return the instances of each node, in order of when they are free, ties by id."""
    nodes: dict[int, list[int]] = {}
    for i in sorted(candidates, key=lambda i: (max(view.instances[i].free_at_s, view.now_s), i)):
        nodes.setdefault(view.instances[i].node, []).append(i)
    return dict(sorted(nodes.items()))


def first_free_group(view: ClusterSnapshot, candidates: Iterable[int], size: int) -> tuple[int, ...]:
    """Return `size` instances on as few nodes as possible, in order of (node, id).

    Of the single nodes with so many, the one where they are all free first; else whole nodes in order of when they are
    free, and the remainder inside one more."""
    return first_free_of(view, by_free_time(view, candidates), size)


def first_free_of(view: ClusterSnapshot, by_node: Mapping[int, list[int]], size: int) -> tuple[int, ...]:
    """`first_free_group` from the result of `by_free_time`, for callers that try several sizes."""
    nodes = dict(by_node)
    chosen: list[int] = []
    while len(chosen) < size:
        missing = size - len(chosen)
        free = {node: ids for node, ids in nodes.items() if ids}
        if not free:
            raise ValueError(f"a group of {size} of {len(chosen)} instances")
        sufficient = [node for node, ids in free.items() if len(ids) >= missing]
        # no node has enough: take a whole one, of those with most
        options = sufficient or [node for node, ids in free.items() if len(ids) == max(map(len, free.values()))]
        best = min(options, key=lambda node: (_all_free_s(view, free[node][:missing]), node))
        chosen += free[best][:missing]
        nodes[best] = []
    return view.ordered(chosen)


def _all_free_s(view: ClusterSnapshot, group: list[int]) -> float:
    return max(view.now_s, *(view.instances[i].free_at_s for i in group))


def least_loaded(view: ClusterSnapshot, candidates: Iterable[int]) -> int:
    """Return the instance whose queue is free first; ties go to fewer requests, then to the lower id."""

    def load(i: int) -> tuple[float, int, int]:
        instance = view.instances[i]
        return max(instance.free_at_s, view.now_s), instance.running, i

    return min(candidates, key=load)


def commit_as_ring(
    request: Request, group: tuple[int, ...], view: ClusterSnapshot, concurrent: bool = False
) -> CommitSpans:
    """Return the commitment of the whole prompt to a group, as one zigzag ring."""
    span = Span(
        request=request,
        start=request.cached_tokens,
        end=request.prompt_tokens,
        group=group,
        strategy=Strategy(attn="ring" if len(group) > 1 else "local"),
    )
    return CommitSpans(request.id, (span,), view.version, concurrent)
