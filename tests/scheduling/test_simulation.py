"""The scheduler under random arrivals, aborts, losses, exhausted KV and wrong predictions.

Nothing is lost, nothing is computed twice, every request ends.

A failing seed is named; `random_world(seed).run()` repeats it.
"""

from __future__ import annotations

import pytest
from tests.helpers.marks import quick_first
from tests.helpers.random_worlds import background_world, random_world
from tests.helpers.scheduler_simulation import World


def run(seed: int) -> World:
    try:
        return random_world(seed).run()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize("first", quick_first(range(0, 1000, 50), 4))
def test_every_request_ends_and_computes_each_token_once_per_admission(first: int) -> None:
    worlds = [run(seed) for seed in range(first, first + 50)]
    assert sum(len(world.finished) for world in worlds) > 200
    assert sum(world.preempted for world in worlds) > 0


@pytest.mark.parametrize("first", quick_first(range(0, 400, 50), 2))
def test_requests_that_no_client_waits_for_end_too(first: int) -> None:
    for seed in range(first, first + 50):
        world = background_world(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_four_thousand_more_seeds_break_no_rule(first: int) -> None:
    for seed in range(first, first + 500):
        run(seed)


@pytest.mark.parametrize("seed", range(0, 60, 3))
def test_the_same_seed_gives_the_same_batches_and_events_byte_for_byte(seed: int) -> None:
    one, two = run(seed), run(seed)
    assert one.log == two.log
    assert len(one.log) > 10
