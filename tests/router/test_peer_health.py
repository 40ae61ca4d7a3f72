"""Instances that cannot work with each other are found, and the cluster goes on with those that can."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router import virtual_time
from tests.router.cluster_clients import ask, beating, prompt, running
from tests.router.fake_instances import FakeCluster, FakeProcess, answer

from headway.runtime.cluster.client import ClusterClient
from headway.runtime.cluster.membership import LOSSES, PeerHealth, PeerVerdict
from headway.runtime.engine.protocol import ComputeSpan, SpanTaskLost, SubmitRequest

SECOND = 1.0


def lose(suspects: PeerHealth, here: int, by: int, times: int = LOSSES, at_s: float = 0.0) -> list[PeerVerdict]:
    said = [suspects.lost(here, by, f"r{turn}", at_s + turn * SECOND) for turn in range(times)]
    return [verdict for verdict in said if verdict is not None]


def test_one_end_of_a_bad_link_restarts_then_the_other_then_one_is_given_up() -> None:
    suspects = PeerHealth()
    assert lose(suspects, 0, 1, LOSSES - 1) == []
    assert lose(suspects, 1, 0, 1, 10.0) == [PeerVerdict(1, False)], "whoever says it, it is one connection"
    assert lose(suspects, 0, 1, 5, 20.0) == [], "it is ending"
    assert suspects.gone(1)
    assert not suspects.gone(1)
    assert lose(suspects, 0, 1, LOSSES, 30.0) == [PeerVerdict(0, False)]
    assert suspects.gone(0)
    assert lose(suspects, 0, 1, LOSSES, 40.0) == [PeerVerdict(1, True)]


def test_a_success_on_a_link_clears_its_losses() -> None:
    suspects = PeerHealth()
    lose(suspects, 0, 1, LOSSES - 1)
    suspects.worked((2, 1, 0))
    assert lose(suspects, 0, 1, LOSSES, 10.0) == [PeerVerdict(1, False)]
    suspects.gone(1)
    suspects.worked((0, 1))
    assert lose(suspects, 0, 1, LOSSES, 20.0) == [PeerVerdict(1, False)], "it had worked since"


def test_the_end_with_losses_on_other_links_is_restarted_first() -> None:
    suspects = PeerHealth()
    lose(suspects, 0, 2, 2)
    lose(suspects, 0, 3, 2)
    assert lose(suspects, 0, 1) == [PeerVerdict(0, False)]


def test_simultaneous_losses_count_once_and_losses_of_one_request_are_not_the_instances() -> None:
    suspects = PeerHealth()
    assert [suspects.lost(0, 1, f"r{k}", 0.01 * k) for k in range(20)] == [None] * 20
    assert [suspects.lost(2, 2, "poison", SECOND * k) for k in range(20)] == [None] * 20
    assert lose(suspects, 3, 3) == [PeerVerdict(3, False)]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["lost", "worked", "gone"]), st.integers(0, 3), st.integers(0, 3))))
def test_restarts_follow_losses_and_are_final_after_both_were_tried(
    acts: list[tuple[str, int, int]],
) -> None:
    suspects = PeerHealth()
    since: dict[frozenset[int], int] = {}
    tried: dict[frozenset[int], set[int]] = {}
    ending: set[int] = set()
    for turn, (act, one, other) in enumerate(acts):
        link = frozenset((one, other))
        if act == "worked":
            suspects.worked((one, other))
            for end in (frozenset((one,)), frozenset((other,)), link):
                since.pop(end, None)
                tried.pop(end, None)
        elif act == "gone":
            assert suspects.gone(one) == (one in ending)
            ending.discard(one)
            since = {each: 0 if one in each else count for each, count in since.items()}
        else:
            verdict = suspects.lost(one, other, f"r{turn}", float(turn))
            if ending & link:
                assert verdict is None
                continue
            since[link] = since.get(link, 0) + 1
            assert (verdict is not None) == (since[link] >= LOSSES)
            if verdict is not None:
                before = tried.setdefault(link, set())
                assert verdict.number in link
                assert verdict.for_good == (before == link)
                before.add(verdict.number)
                ending.add(verdict.number)


async def twenty(client: ClusterClient, turn: int) -> None:
    """Requests a quarter of a second after each other, all answered."""

    async def one(number: int) -> None:
        await virtual_time.pause(0.25 * (number % 20))
        assert await ask(client, f"r{number}", prompt(number, 60)) == answer(prompt(number, 60), 4)

    await asyncio.gather(*(one(20 * turn + number) for number in range(20)))


@pytest.mark.parametrize(
    ("placement", "options", "roles"),
    [
        ("fixed-sp", {"sp": 2}, ("mixed",) * 4),
        ("fifo", {"long_tokens": 40, "long_sp": 2}, ("mixed",) * 4),
        ("tetris", {"sizes": [2]}, ("prefill",) * 4 + ("decode",)),
    ],
)
async def test_two_instances_that_cannot_reach_each_other_cost_no_request(
    placement: str, options: dict[str, object], roles: tuple[str, ...]
) -> None:
    fake = FakeCluster(run_s=0.005, apart=lambda one, other: {one.number, other.number} == {0, 1})
    async with running(fake, roles, placement, options) as client:
        ends = client.report().instances[:2]
        for turn in range(20):
            await twenty(client, turn)
            ends = client.report().instances[:2]
            if any(instance.state == "failed" for instance in ends):
                break
        assert sorted(instance.state for instance in ends) == ["failed", "ready"]
        (failed,) = (instance for instance in ends if instance.state == "failed")
        assert failed.failure is not None
        assert "do not work together: instance" in failed.failure
        assert [instance.restarts_total for instance in ends] == [1, 1]


async def test_an_instance_whose_spans_fail_is_restarted_and_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FakeProcess._compute

    def fails(process: FakeProcess, message: ComputeSpan) -> None:
        if process.number == 1 and process.serial == 0:
            process._say(SpanTaskLost(message.id, "it failed: out of memory", 1))
        else:
            whole(process, message)

    fake = FakeCluster(run_s=0.005)
    async with running(fake, ("mixed",) * 4, "fixed-sp", {"sp": 2}) as client:
        monkeypatch.setattr(FakeProcess, "_compute", fails)
        for turn in range(20):
            await twenty(client, turn)
            if client.report().instances[1].restarts_total:
                break
        assert [instance.restarts_total for instance in client.report().instances] == [0, 1, 0, 0]


async def test_a_silent_instance_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FakeProcess._submit

    def stuck(process: FakeProcess, submit: SubmitRequest, ids: list[int]) -> None:
        if process.serial or process.number:
            whole(process, submit, ids)

    fake = FakeCluster(run_s=0.01)
    silent = beating(fake, dumb=lambda process: not process.serial and not process.number)
    async with running(fake, ("mixed",) * 2, "jsq") as client, silent:
        monkeypatch.setattr(FakeProcess, "_submit", stuck)
        asks = [asyncio.create_task(ask(client, f"r{number}", prompt(number, 60))) for number in range(6)]
        assert await asyncio.gather(*asks) == [answer(prompt(number, 60), 4) for number in range(6)]
        assert [instance.restarts_total for instance in client.report().instances] == [1, 0]
