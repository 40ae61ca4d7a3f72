"""LoongServe's single-request scheduling as Tetris §2.4 describes and §7.1 compares with: it ignores the load.

Each request, when it arrives, gets the size and group that end its own prefill first, queues included; of equal ends
the larger group. Prefill instances only; decodes are placed as in Tetris.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.core.span import Span, Strategy
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.base import Action, ActionRefused, CommitSpans, Event, PlacementPolicy, RequestArrived
from headway.policy.placement.decode_placement import DecodePlacement
from headway.policy.placement.groups import by_free_time, first_free_of
from headway.policy.placement.loongserve.options import LoongServeOptions
from headway.policy.placement.registry import PolicyContext
from headway.policy.placement.view import ClusterSnapshot


class GreedyDispatch(PlacementPolicy):
    """See the module."""

    def __init__(self, context: PolicyContext, options: LoongServeOptions) -> None:
        self._latency, self._options = context.latency, options
        self._decodes = DecodePlacement()
        self._requests: dict[str, Request] = {}
        self._instances: tuple[int, ...] = ()

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if isinstance(event, RequestArrived):
            self._requests[event.request.id] = event.request
            return self._place(event.request, view)
        if isinstance(event, ActionRefused) and event.action == "commit":
            self._decodes.withdraw(event.request)
            return self._place(self._requests[event.request], view)
        return self._decodes.on_event(event)

    def _place(self, request: Request, view: ClusterSnapshot) -> Sequence[Action]:
        group = self._best_group(request, view)
        span = Span(
            request=request,
            start=request.cached_tokens,
            end=request.prompt_tokens,
            group=group,
            strategy=Strategy(attn="striped" if len(group) > 1 else "local"),
        )
        return [CommitSpans(request.id, (span,), view.version), *self._decodes.place(request, [group], view)]

    def _best_group(self, request: Request, view: ClusterSnapshot) -> tuple[int, ...]:
        if not self._instances:
            self._instances = view.with_role("prefill")
            if not self._instances:
                raise ConfigError("loongserve: `prefill: greedy` needs a cluster of prefill (and decode) instances")
        past, tokens = request.cached_tokens, request.prompt_tokens - request.cached_tokens
        most = min(self._options.max_sp or len(self._instances), len(self._instances))
        # powers of two, and the largest group even if it is none
        sizes = sorted({1 << k for k in range(most.bit_length()) if 1 << k <= most} | {most})
        best, earliest_s = self._instances[:1], float("inf")
        nodes = by_free_time(view, self._instances)
        for size in sizes:
            group = first_free_of(view, nodes, size)
            start_s = max(view.now_s, *(view.instances[i].free_at_s for i in group))
            end_s = start_s + self._latency.prefill_s(past, tokens, GroupShape(size, view.nodes_of(group)))
            # sizes ascend: of equal ends the larger group
            if end_s <= earliest_s:
                best, earliest_s = group, end_s
        return best
