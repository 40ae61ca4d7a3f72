"""Reservation, as PecSched §6.2 sets Llumnix up: some instances serve long requests only, all others short ones only.

Short requests join the instance of their part whose queue is free first. Long ones take `long_sp` of the reserved
instances as one ring, node first, in order of arrival, and decode there. With `borrow` an idle reserved instance may
take a short request while no long one waits or runs there: the mitigation that the paper names (§3.2), off in it.
Llumnix's own migration of requests between instances is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.policy.placement.base import Action, EnqueueRequest, Event, InstanceLost, RequestArrived, SpanDone
from headway.policy.placement.groups import first_free_group, least_loaded, prefilling, ring_commit
from headway.policy.placement.registry import PolicyContext, PolicyOptions
from headway.policy.placement.view import ClusterSnapshot


class ReservationOptions(PolicyOptions, frozen=True, kw_only=True):
    """long_tokens: prompts above this are long; long_sp: instances that a long one takes; reserved: instances for long
    requests (null: long_sp); borrow: idle ones take short requests."""

    long_tokens: int = 32_768
    long_sp: int = 4
    reserved: int | None = None
    borrow: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.long_sp < 1 or (self.reserved is not None and self.reserved < self.long_sp):
            raise ValueError("`long_sp` must be at least 1, and `reserved` at least `long_sp`")
        if self.long_tokens < 0:
            raise ValueError("`long_tokens` must be at least 0")


class ReservationPlacement:
    """See the module."""

    def __init__(self, surroundings: PolicyContext, options: ReservationOptions) -> None:
        self._options = options
        self._kept: tuple[int, ...] = ()
        self._rest: tuple[int, ...] = ()
        self._groups: dict[str, tuple[int, ...]] = {}

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """See Placement."""
        if not self._kept and isinstance(event, RequestArrived):
            self._divide(view)
        if isinstance(event, InstanceLost):
            self._divide_again(view)
        if isinstance(event, RequestArrived):
            return [self._place(event.request, view)]
        if isinstance(event, SpanDone) and event.last:
            return [EnqueueRequest(event.request, self._groups.pop(event.request), "decode")]
        return []

    def next_wakeup(self, now: float) -> float | None:
        """See Placement."""
        return None

    def _divide(self, view: ClusterSnapshot) -> None:
        able = prefilling(view, "reservation")
        count = self._options.reserved or self._options.long_sp
        if count >= len(able):
            raise ConfigError(f"{count} of {len(able)} instances cannot be reserved: short requests need at least one")
        self._kept = first_free_group(view, able, count)
        self._rest = tuple(i for i in able if i not in self._kept)

    def _divide_again(self, view: ClusterSnapshot) -> None:
        """An instance is gone. Where too few are left for two parts, they take whatever comes."""
        able = view.with_role("mixed", "prefill")
        if (self._options.reserved or self._options.long_sp) < len(able):
            self._divide(view)
        else:
            self._kept = self._rest = able

    def _place(self, request: Request, view: ClusterSnapshot) -> Action:
        if request.prompt_tokens > self._options.long_tokens:
            group = first_free_group(view, self._kept, min(self._options.long_sp, len(self._kept)))
            self._groups[request.id] = group
            return ring_commit(request, group, view)
        able = self._rest
        if self._options.borrow:
            idle = (i for i in self._kept if view.instances[i].free_at_s <= view.now_s)
            able = (*able, *(i for i in idle if not view.instances[i].running))
        return EnqueueRequest(request.id, (least_loaded(view, able),))
