"""Requests that are larger than any one instance's KV pool, over fake instances that keep books of KV."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.polling import eventually
from tests.router.cluster_clients import ask, prompt, running
from tests.router.fake_instances import FakeCluster, answer

from headway.core.errors import RequestError, UnavailableError
from headway.policy.placement.contract import Role

APART: tuple[Role, ...] = ("prefill", "prefill", "decode")
POOL = 1024
LARGE = prompt(1, POOL * 8 // 5)


def decodes(fake: FakeCluster) -> bool:
    """Whether a group has begun to decode in place."""
    return any(getattr(getattr(message, "run", None), "in_place", False) for _, message in fake.log)


@pytest.mark.parametrize(
    ("placement", "options"),
    [
        ("fixed-sp", {"sp": 2}),
        ("context-parallel", {}),
        ("tetris", {"sizes": [1, 2]}),
        ("ladder", {}),
        ("loongserve", {}),
        ("loongserve", {"prefill": "greedy"}),
        ("pecsched", {}),
        ("fifo", {"long_sp": 2}),
        ("priority", {"long_sp": 2}),
    ],
)
async def test_every_policy_gives_a_request_to_a_group_that_holds_it(
    placement: str, options: dict[str, object]
) -> None:
    fake = FakeCluster(run_s=0.01, token_s=0.001, kv_tokens=POOL)
    async with running(fake, APART, placement, options) as client:
        longest = client.info.max_model_len
        assert POOL < len(LARGE) + 20 < longest < 2 * POOL
        shorts = [prompt(seed, 100) for seed in (2, 3)]
        asks = [ask(client, f"r{at}", each, 20) for at, each in enumerate([LARGE, shorts[0], LARGE, shorts[1]])]
        assert await asyncio.gather(*asks) == [answer(each, 20) for each in (LARGE, shorts[0], LARGE, shorts[1])]
        assert decodes(fake)
        with pytest.raises(RequestError, match=f"instances hold requests of up to {longest}"):
            await ask(client, "more", prompt(1, longest), 1)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_member_that_dies_is_waited_for(phase: str) -> None:
    fake = FakeCluster(run_s=0.05, token_s=0.005, start_s=0.2, kv_tokens=POOL)
    async with running(fake, APART, "fixed-sp", {"sp": 2}) as client:
        asked = asyncio.create_task(ask(client, "a", LARGE, 20))
        await eventually(lambda: decodes(fake) if phase == "decode" else bool(fake.log))
        fake.kill(1)
        # One instance is left, which does not hold the request: what it holds goes on meanwhile.
        assert await ask(client, "b", prompt(2, 50), 4) == answer(prompt(2, 50), 4)
        assert await asked == answer(LARGE, 20)
        assert client.stats.engine_restarts_total == 1


async def test_it_fails_once_the_instances_that_are_left_cannot_hold_it() -> None:
    fake = FakeCluster(run_s=0.05, token_s=0.005, kv_tokens=POOL)
    async with running(fake, APART, "fixed-sp", {"sp": 2}) as client:
        with pytest.raises(RequestError, match="cannot leave: without it the others hold requests of up to 1024"):
            client.leave(1)
        asked = asyncio.create_task(ask(client, "a", LARGE, 20))
        await eventually(lambda: decodes(fake))
        fake.refuse = lambda number, serial: "the disk is gone"
        fake.kill(1)
        with pytest.raises(UnavailableError, match="instances that are left hold requests of up to 1024 tokens"):
            await asyncio.wait_for(asked, 30)
        assert await ask(client, "b", prompt(2, 50), 4) == answer(prompt(2, 50), 4)
