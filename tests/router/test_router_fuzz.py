"""Routers under anything at once: limited room, deaths, cuts, instances and clients that come and go."""

from __future__ import annotations

import pytest
from tests.helpers import virtual_time
from tests.helpers.router_fuzz import go

SEEDS = 60
LONG = 60
"""Times as many."""


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.long) for turn in range(1, LONG))])
def test_every_request_is_answered_whatever_happens_and_nothing_is_left(turn: int) -> None:
    done = virtual_time.run(go(range(turn * SEEDS, (turn + 1) * SEEDS)))
    assert min(done.get(what, 0) for what in ("kill", "leave", "join", "cut", "gone")) > 0, done
