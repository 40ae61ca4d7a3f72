"""The scheduler under random arrivals, aborts, losses, exhausted KV and wrong predictions.

Nothing is lost, nothing is computed twice, every request ends, and a policy that is driven alone picks the same.

A failing seed is named; `random_world(seed).run()` repeats it.
"""

from __future__ import annotations

import pytest
from tests.helpers.marks import quick_first
from tests.scheduling.policy_alone import PolicyBesideScheduler, beside
from tests.scheduling.scheduler_world import World, random_world


def run(seed: int, background: bool = False) -> tuple[World, PolicyBesideScheduler]:
    """Run a world, and a policy alone beside its scheduler, of which nothing is left."""
    world = random_world(seed, background=background)
    policy = beside(world)
    try:
        world.run()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    assert policy.pool.blocks == {}
    assert not list(policy.policy.order(world.now))
    assert policy.policy.holders == {}
    return world, policy


@pytest.mark.parametrize("first", quick_first(range(0, 1500, 50), 2))
def test_every_request_ends_computes_each_token_once_per_admission_and_a_policy_alone_gives_the_same_quotas(
    first: int,
) -> None:
    ran = [run(seed) for seed in range(first, first + 50)]
    assert sum(len(world.finished) for world, _ in ran) > 200
    assert sum(world.preempted for world, _ in ran) > 0
    assert sum(policy.picked for _, policy in ran) > 500


@pytest.mark.parametrize("first", quick_first(range(0, 400, 50)))
def test_requests_that_no_client_waits_for_end_too(first: int) -> None:
    for seed in range(first, first + 50):
        run(seed, background=True)


@pytest.mark.parametrize("seed", range(0, 60, 20))
def test_the_same_seed_gives_the_same_batches_and_events_byte_for_byte(seed: int) -> None:
    one, two = random_world(seed).run(), random_world(seed).run()
    assert one.log == two.log
    assert len(one.log) > 10
