"""Which instances make a group: inside one node where possible, else whole nodes, by when they are free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.core.span import Span, Strategy
from headway.policy.placement.base import CommitSpans
from headway.policy.placement.view import ClusterSnapshot


def prefilling(view: ClusterSnapshot, policy: str) -> tuple[int, ...]:
    """Ids of the instances that prefill; ConfigError where there are none, in the words of a policy."""
    able = view.with_role("mixed", "prefill")
    if not able:
        raise ConfigError(f"{policy} needs at least one instance of role mixed or prefill")
    return able


def by_free_time(view: ClusterSnapshot, able: Iterable[int]) -> dict[int, list[int]]:
    """Instances of each node, those that are free first in front; ties by id."""
    nodes: dict[int, list[int]] = {}
    for i in sorted(able, key=lambda i: (max(view.instances[i].free_at_s, view.now_s), i)):
        nodes.setdefault(view.instances[i].node, []).append(i)
    return dict(sorted(nodes.items()))


def first_free_group(view: ClusterSnapshot, able: Iterable[int], size: int) -> tuple[int, ...]:
    """`size` instances on as few nodes as can be: of the single nodes that hold them, that where they are all free
    first; else whole nodes by when they are free, and the rest inside one more. In order of (node, id)."""
    return first_free_of(view, by_free_time(view, able), size)


def first_free_of(view: ClusterSnapshot, by_node: Mapping[int, list[int]], size: int) -> tuple[int, ...]:
    """The same from what `by_free_time` gave, for several sizes at one time."""
    nodes = dict(by_node)
    chosen: list[int] = []
    while len(chosen) < size:
        need = size - len(chosen)
        free = {node: ids for node, ids in nodes.items() if ids}
        if not free:
            raise ValueError(f"a group of {size} of {len(chosen)} instances")
        holding = [node for node, ids in free.items() if len(ids) >= need]
        pick = holding or [node for node, ids in free.items() if len(ids) == max(map(len, free.values()))]
        best = min(pick, key=lambda node: (_all_free_s(view, free[node][:need]), node))
        chosen += free[best][:need]
        nodes[best] = []
    return view.ordered(chosen)


def _all_free_s(view: ClusterSnapshot, group: list[int]) -> float:
    return max(view.now_s, *(view.instances[i].free_at_s for i in group))


def least_loaded(view: ClusterSnapshot, able: Iterable[int]) -> int:
    """The instance whose queue is free first; then the one with fewest requests, then the lower id."""

    def load(i: int) -> tuple[float, int, int]:
        at = view.instances[i]
        return max(at.free_at_s, view.now_s), at.running, i

    return min(able, key=load)


def ring_commit(request: Request, group: tuple[int, ...], view: ClusterSnapshot, beside: bool = False) -> CommitSpans:
    """The whole prompt on a group, as one plain ring."""
    span = Span(
        request=request,
        start=request.cached_tokens,
        end=request.prompt_tokens,
        group=group,
        strategy=Strategy(attn="ring" if len(group) > 1 else "local"),
    )
    return CommitSpans(request.id, (span,), view.version, beside)
