"""The machine under random work and losses: nobody runs twice, nothing is left behind, and everybody's turn comes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_chaos import Chaos

from headway.placement.base import Arrived, Dropped, Finished, Lost, Paused, Refused


@settings(max_examples=40)
@given(st.integers(0, 1 << 30))
def test_nobody_is_lost_under_losses(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(250):
        chaos.step()
    chaos.end()
    heard = chaos.policy.heard
    arrived = [event.request.id for event in heard if isinstance(event, Arrived)]
    ended = [event.request for event in heard if isinstance(event, Finished | Dropped)]
    assert sorted(arrived) == sorted(ended) == sorted(chaos.ended), "each ends once"
    assert all(holder is None for holder in chaos.machine.lanes.holder)
    assert not chaos.machine.state.transfers.under_way()
    assert not any(chaos.machine.state.load)
    assert max(map(abs, chaos.machine.state.tokens)) < 1e-6


def test_random_work_reaches_what_it_is_meant_to() -> None:
    heard = []
    for seed in range(10):
        chaos = Chaos(seed)
        for _ in range(250):
            chaos.step()
        heard += chaos.policy.heard
    kinds = {type(event) for event in heard}
    assert {Paused, Lost, Refused, Finished, Dropped} <= kinds


@pytest.mark.long
def test_nobody_is_lost_for_long() -> None:
    for seed in range(2000):
        chaos = Chaos(seed, losses=0.1)
        for _ in range(400):
            chaos.step()
        chaos.end()
