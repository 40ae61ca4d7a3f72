"""Two policies that PecSched compares with (§6.2): strict priority for short requests, and instances reserved for long
ones.

Short requests join the instance whose queue is free first. Long requests wait in one queue, in order of arrival, until
`long_sp` instances are without work at the same time; a running one is not preempted. Under a steady stream of short
requests that moment never comes: long requests starve (§3.2, Table 2). In `default` mode a long request that has waited
long enough is promoted, as in FastServe (the remedy that §3.2 names): it takes its instances as under FIFO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self

from pydantic import model_validator
from typing_extensions import override

from headway.core.errors import ConfigError
from headway.core.file_sections import PositiveOrZero, Seconds
from headway.core.request import Request, Strategy
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.baselines import (
    FifoOptions,
    FifoPlacement,
    commit_as_ring,
    first_free_group,
    is_long,
    least_loaded,
    prefill_instances,
)
from headway.policy.placement.contract import (
    Action,
    ClusterSnapshot,
    EnqueueRequest,
    Event,
    InstanceLost,
    PlacementPolicy,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    SpanDone,
)
from headway.policy.placement.registry import PolicyContext


class PriorityOptions(FifoOptions):
    """Settings of `priority`."""

    renamed: ClassVar[Mapping[str, str]] = {"beside": "concurrent"}
    concurrent: bool = False
    """Kinder than the paper: a long prompt may begin on instances that only decode, and runs together with these."""
    promote: PositiveOrZero | Literal["off"] | None = None
    """A long request that has waited so many times its own predicted prefill time is promoted: it takes the instances
    that are free first, and later requests there wait for it; sooner where the target for its first token needs that.
    "off": never. None: off in mode `paper`, else 5."""
    retry_s: Seconds = 0.1
    """How often a waiting long prompt is tried, besides at the end of each request."""

    @property
    def promotes_after(self) -> float:
        """Times its own prefill that a long request waits before it is promoted; infinite: never."""
        if self.promote is None:
            return float("inf") if self.mode == "paper" else 5.0
        return float("inf") if self.promote == "off" else self.promote


class PriorityPlacement(PlacementPolicy):
    """See the module."""

    def __init__(self, context: PolicyContext, options: PriorityOptions) -> None:
        self._options, self._latency = options, context.latency
        self._long_queue: dict[str, Request] = {}
        self._groups: dict[str, tuple[int, ...]] = {}  # of long requests that have begun
        self._wake_s = 0.0

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        actions: list[Action] = []
        if isinstance(event, RequestArrived):
            request, candidates = event.request, prefill_instances(view, "priority")
            if not is_long(request, self._options.long_tokens, candidates, view):
                return [EnqueueRequest(request.id, (least_loaded(view, candidates),))]
            self._long_queue[request.id] = request
        elif isinstance(event, SpanDone) and event.last:
            # it keeps its group until it ends: these instances do not count as idle for the next long request
            group = self._groups[event.request]
            actions.append(EnqueueRequest(event.request, group, "decode", concurrent=True))
        elif isinstance(event, RequestFinished | RequestDropped):
            self._groups.pop(event.request, None)
            self._long_queue.pop(event.request, None)
        elif isinstance(event, RequestPrefilled):
            return []
        if self._long_queue:
            actions += self._start_first_long(view)
        return actions

    def next_wakeup(self, now: float) -> float | None:
        if not self._long_queue:
            return None
        # kept until it has passed, so that a stream of events cannot postpone it
        if self._wake_s <= now:
            self._wake_s = now + self._options.retry_s
        return self._wake_s

    def _start_first_long(self, view: ClusterSnapshot) -> list[Action]:
        """Commit the first waiting long request if enough instances are without work now."""
        taken = {i for group in self._groups.values() for i in group}
        # not `prefill_instances`: after losses there may be none left, which is no error here
        candidates = view.with_role("mixed", "prefill")
        idle = [i for i in candidates if i not in taken and self._is_idle(i, view)]
        # a cluster smaller than `long_sp` serves long requests on all it has
        size = min(self._options.long_sp, len(candidates))
        if not candidates:
            return []
        request = next(iter(self._long_queue.values()))
        if len(idle) < size:
            if not self._is_promoted(request, size, view):
                return []
            # behind other long requests only where too few instances are without one
            without = [i for i in candidates if i not in taken]
            idle = without if len(without) >= size else list(candidates)
        del self._long_queue[request.id]
        group = first_free_group(view, idle, size)
        self._groups[request.id] = group
        return [commit_as_ring(request, group, view, concurrent=self._options.concurrent)]

    def _is_promoted(self, request: Request, size: int, view: ClusterSnapshot) -> bool:
        after = self._options.promotes_after
        if after == float("inf"):
            return False
        tokens = request.prompt_tokens - request.cached_tokens
        ring = GroupShape(size, strategy=Strategy(attn="ring") if size > 1 else Strategy())
        alone_s = self._latency.prefill_s(request.cached_tokens, tokens, ring)
        waited_s, due_s = view.now_s - request.arrival_s, request.slo.ttft_s
        return waited_s >= after * alone_s or (due_s is not None and waited_s >= due_s - alone_s)

    def _is_idle(self, instance: int, view: ClusterSnapshot) -> bool:
        known = view.instances[instance]
        if known.queued or known.free_at_s > view.now_s:
            return False
        return self._options.concurrent or not known.running


# Reservation, as PecSched §6.2 sets Llumnix up: some instances serve long requests only, all others short ones only.
#
# Each part is served as under FIFO: short requests join the instance of their part whose queue is free first, long ones
# take `long_sp` of the reserved instances as one ring, and decode there. Llumnix's own migration of requests between
# instances is not modelled.


class ReservationOptions(FifoOptions):
    """Settings of `reservation`."""

    reserved: int | None = None
    """Instances for long requests; None: `long_sp`."""
    borrow: bool | None = None
    """Let an idle reserved instance take a short request while no long one waits or runs there: the mitigation that the
    paper names (§3.2). None: off in mode `paper`, else on."""

    @property
    def borrows(self) -> bool:
        """Whether short requests may go to idle reserved instances."""
        return self.mode != "paper" if self.borrow is None else self.borrow

    @model_validator(mode="after")
    def _reserved_for_one(self) -> Self:
        if self.reserved is not None and self.reserved < self.long_sp:
            raise ValueError("`reserved` must be at least `long_sp`")
        return self


class ReservationPlacement(FifoPlacement):
    """See above."""

    _options: ReservationOptions

    def __init__(self, context: PolicyContext, options: ReservationOptions) -> None:
        super().__init__(context, options)
        self._for_long: tuple[int, ...] = ()
        self._for_short: tuple[int, ...] = ()

    @override
    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if not self._for_long and isinstance(event, RequestArrived):
            self._divide(view)
        if isinstance(event, InstanceLost):
            self._divide_again(view)
        return super().on_event(event, view)

    def _divide(self, view: ClusterSnapshot) -> None:
        instances = prefill_instances(view, "reservation")
        count = self._options.reserved or self._options.long_sp
        # at the start too few instances are a configuration error; after a loss they are not (`_divide_again`)
        if count >= len(instances):
            raise ConfigError(
                f"{count} of {len(instances)} instances cannot be reserved: short requests need at least one"
            )
        self._for_long = first_free_group(view, instances, count)
        self._for_short = tuple(i for i in instances if i not in self._for_long)

    def _divide_again(self, view: ClusterSnapshot) -> None:
        """Divide what is left after the loss of an instance; both parts are all of it where too few are left for
        two."""
        instances = view.with_role("mixed", "prefill")
        if (self._options.reserved or self._options.long_sp) < len(instances):
            self._divide(view)
        else:
            self._for_long = self._for_short = instances

    @override
    def _candidates(self, view: ClusterSnapshot) -> tuple[Sequence[int], Sequence[int]]:
        short = self._for_short
        if self._options.borrows:
            # idle: no committed span is left, and no request is resident (decodes do not show in `free_at_s`)
            idle = (i for i in self._for_long if view.instances[i].free_at_s <= view.now_s)
            short = (*short, *(i for i in idle if not view.instances[i].running))
        return short, self._for_long
