"""Reservation, as PecSched §6.2 sets Llumnix up: some instances serve long requests only, all others short ones only.

Short requests join the instance of their part whose queue is free first. Long ones take `long_sp` of the reserved
instances as one ring, node first, in order of arrival, and decode there. Llumnix's own migration of requests between
instances is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import Count, CountOrZero
from headway.core.request import Request
from headway.policy.placement.base import (
    Action,
    EnqueueRequest,
    Event,
    InstanceLost,
    PlacementPolicy,
    RequestArrived,
    SpanDone,
)
from headway.policy.placement.groups import commit_as_ring, first_free_group, least_loaded, prefill_instances
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


class ReservationOptions(PolicyOptions):
    """Settings of `reservation`."""

    long_tokens: CountOrZero = 32_768
    """Prompts above this are long."""
    long_sp: Count = 4
    """Instances of a long prompt."""
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


class ReservationPlacement(PlacementPolicy):
    """See the module."""

    def __init__(self, context: PolicyContext, options: ReservationOptions) -> None:
        self._options = options
        self._for_long: tuple[int, ...] = ()
        self._for_short: tuple[int, ...] = ()
        self._groups: dict[str, tuple[int, ...]] = {}  # of long requests, until they decode

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        if not self._for_long and isinstance(event, RequestArrived):
            self._divide(view)
        if isinstance(event, InstanceLost):
            self._divide_again(view)
        if isinstance(event, RequestArrived):
            return [self._place(event.request, view)]
        if isinstance(event, SpanDone) and event.last:
            return [EnqueueRequest(event.request, self._groups.pop(event.request), "decode")]
        return []

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

    def _place(self, request: Request, view: ClusterSnapshot) -> Action:
        if request.prompt_tokens > self._options.long_tokens:
            group = first_free_group(view, self._for_long, min(self._options.long_sp, len(self._for_long)))
            self._groups[request.id] = group
            return commit_as_ring(request, group, view)
        candidates = self._for_short
        if self._options.borrows:
            # idle: no committed span is left, and no request is resident (decodes do not show in `free_at_s`)
            idle = (i for i in self._for_long if view.instances[i].free_at_s <= view.now_s)
            candidates = (*candidates, *(i for i in idle if not view.instances[i].running))
        return EnqueueRequest(request.id, (least_loaded(view, candidates),))
