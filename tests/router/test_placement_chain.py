"""What policies hear that follow one another as instances come and go."""

from __future__ import annotations

from typing import cast

import pytest
from tests.helpers.told_policy import Told

from headway.core.request import Request
from headway.policy.placement.contract import (
    Action,
    ClusterInstance,
    ClusterLinks,
    ClusterSnapshot,
    ClusterState,
    EnqueueRequest,
    Event,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    RequestArrived,
    RequestFinished,
    RequestPrefilled,
)
from headway.runtime.cluster.membership import PlacementChain

LINKS = cast(ClusterLinks, None)
VIEW = ClusterSnapshot(ClusterState([], LINKS), 0.0)


@pytest.mark.parametrize("change", [InstanceJoined(1), InstanceLeft(1), InstanceLost(1)])
def test_policies_with_requests_hear_of_instances(change: Event) -> None:
    """A policy that is made afterwards finds them in its first snapshot."""
    made: list[Told] = []

    def make() -> Told:
        made.append(Told())
        return made[-1]

    chain = PlacementChain(make)
    arrived = RequestArrived(Request(id="r", arrival_s=0.0, prompt_tokens=1, max_output_tokens=1))
    chain.on_event(change, VIEW)
    chain.on_event(arrived, VIEW)
    chain.on_event(change, VIEW)
    # its policy has not placed it, and is replaced
    assert chain.unplaced == {"r": False}
    chain.on_event(RequestFinished("r"), VIEW)
    assert not chain.unplaced
    chain.on_event(change, VIEW)
    assert [each.heard for each in made] == [[], [arrived, change, RequestFinished("r")], [], []]


def test_a_drained_instance_gets_nothing_but_of_requests_that_it_has() -> None:
    """A lost one gets nothing at all."""
    state = ClusterState([ClusterInstance(id=i, node=0) for i in range(2)], LINKS)
    view, wanted = ClusterSnapshot(state, 0.0), list[Action]()
    policy = Told()
    policy.on_event = lambda event, view: wanted  # type: ignore[method-assign]
    chain = PlacementChain(lambda: policy)
    for name in ("there", "new"):
        chain.on_event(RequestArrived(Request(id=name, arrival_s=0.0, prompt_tokens=1, max_output_tokens=1)), view)
    wanted[:] = [EnqueueRequest("there", (0,))]
    assert chain.on_event(RequestPrefilled("there", (0,)), view) == wanted
    state.remove(0)
    assert chain.on_event(RequestPrefilled("there", (0,)), view) == wanted
    wanted[:] = [EnqueueRequest("new", (0,)), EnqueueRequest("new", (1,))]
    assert chain.on_event(RequestPrefilled("new", (0,)), view) == []
    assert chain.unplaced == {"new": True}
    wanted[:] = []
    chain.on_event(InstanceLost(0), view)
    wanted[:] = [EnqueueRequest("there", (0,))]
    assert chain.on_event(RequestPrefilled("there", (0,)), view) == []
