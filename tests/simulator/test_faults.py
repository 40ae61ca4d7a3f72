"""The fault explorer passes on the scheduler as it is, and finds faults that are put into it."""

from __future__ import annotations

import pytest
from tests.helpers import faults
from tests.helpers.faults import FaultWorld, explore

from headway.kv.block_manager import BlockManager
from headway.policy.iteration.scheduler import Scheduler


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_random_seeds_violate_no_invariant(first: int) -> None:
    said: list[str] = []
    assert explore(range(first, first + 30), said.append) == 0, said


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2000, 250))
def test_a_thousand_more_seeds_violate_no_invariant(first: int) -> None:
    said: list[str] = []
    assert explore(range(first, first + 250), said.append) == 0, said


def test_the_same_seed_gives_the_same_run() -> None:
    assert FaultWorld(11).run() == FaultWorld(11).run()


def test_a_leaked_block_is_found_and_the_seed_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "free", lambda self, lease: self._leases.pop(lease.request))
    said: list[str] = []
    assert explore([3], said.append) == 1
    assert said[0].startswith("seed 3: ")
    assert "tests.helpers.faults 3" in said[0]


def test_a_token_computed_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler.complete

    def forgetful(self, batch_id, results, now, elapsed_s=None, repeats=1):  # type: ignore[no-untyped-def]
        for chunk in self.state.in_flight[batch_id].chunks:
            if not chunk.last and self.config.stages == 1:
                self.state.sequences[chunk.request].scheduled -= 1
        return real(self, batch_id, results, now, elapsed_s, repeats)

    monkeypatch.setattr(Scheduler, "complete", forgetful)
    assert explore(range(20), lambda _: None) == 1


def test_an_unmet_requirement_is_an_error() -> None:
    with pytest.raises(Exception, match="a b"):
        faults.require(False, "a", "b")
