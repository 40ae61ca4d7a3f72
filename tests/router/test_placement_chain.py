"""What policies hear that follow one another as instances come and go."""

from __future__ import annotations

from typing import cast

import pytest
from tests.helpers.told_policy import Told

from headway.core.request import Request
from headway.policy.placement.base import (
    Event,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    RequestArrived,
    RequestFinished,
)
from headway.policy.placement.view import ClusterSnapshot
from headway.runtime.cluster.policies import PlacementChain

VIEW = cast(ClusterSnapshot, None)


@pytest.mark.parametrize("change", [InstanceJoined(1), InstanceLeft(1), InstanceLost(1)])
def test_policies_with_requests_hear_of_instances(change: Event) -> None:
    """A policy that is made afterwards finds them in its first snapshot."""
    made: list[Told] = []

    def make() -> Told:
        made.append(Told())
        return made[-1]

    chain = PlacementChain(make, lambda name, number: True)
    arrived = RequestArrived(Request(id="r", arrival_s=0.0, prompt_tokens=1, max_output_tokens=1))
    chain.on_event(change, VIEW)
    chain.on_event(arrived, VIEW)
    chain.renew()
    chain.on_event(change, VIEW)
    chain.on_event(RequestFinished("r"), VIEW)
    chain.on_event(change, VIEW)
    assert [each.heard for each in made] == [[arrived, change, RequestFinished("r")], []]
