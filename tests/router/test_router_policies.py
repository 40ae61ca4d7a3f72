"""The router over instances that keep books of KV: every policy, every answer whole, nothing left behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.helpers.polling import run_ready_tasks
from tests.router import virtual_time
from tests.router.cluster_clients import ask, prompt, running
from tests.router.fake_instances import FakeCluster, answer

from headway.core.errors import RequestError
from headway.policy.placement.contract import RateTable, Role
from headway.runtime.engine.protocol import ComputeSpan, SendKv

MIXED: tuple[Role, ...] = ("mixed",) * 3
APART: tuple[Role, ...] = ("prefill", "prefill", "decode")
WAYS: list[tuple[str, tuple[Role, ...], dict[str, object]]] = [
    ("jsq", MIXED, {}),
    ("fifo", MIXED, {"long_tokens": 100, "long_sp": 2}),
    ("fifo", APART, {"long_tokens": 100, "long_sp": 2}),
    ("priority", MIXED, {"long_tokens": 100, "long_sp": 2}),
    ("reservation", MIXED, {"long_tokens": 100, "long_sp": 2}),
    ("fixed-sp", MIXED, {"sp": 2}),
    ("fixed-sp", APART, {"sp": 2}),
    ("fixed-sp", APART, {"sp": 1}),
    ("context-parallel", APART, {}),
    ("tetris", MIXED, {"sizes": [1, 2]}),
    ("tetris", APART, {"sizes": [1, 2]}),
    ("ladder", APART, {}),
    ("ladder", MIXED, {}),
    ("loongserve", MIXED, {}),
    ("loongserve", APART, {}),
    ("pecsched", APART, {"long_tokens": 100}),
    ("pecsched", MIXED, {"long_tokens": 100, "disaggregate": False}),
    ("fifo-in-place", MIXED, {"long_tokens": 100, "long_sp": 2}),
    ("loongserve-in-place", MIXED, {}),
    ("loongserve-in-place", MIXED, {"decode_batch": 1}),
    ("loongserve", MIXED, {"decode_batch": 1}),
]


async def test_improvement_rates_are_replaced_in_a_running_cluster() -> None:
    table = RateTable(points=((0.0, 0.9),))

    fake = FakeCluster(run_s=0.002, token_s=0.0005, send_s=0.0005)
    async with running(fake, APART, "tetris", {"sizes": [1, 2]}) as client:
        client.replace_rates(table)
        ids = prompt(1, 60)
        assert await asyncio.wait_for(ask(client, "a", ids, 3), 20) == answer(ids, 3)
    async with running(fake, MIXED, "jsq") as client:
        with pytest.raises(RequestError, match="jsq has no improvement rates: tetris has"):
            client.replace_rates(table)


@pytest.mark.parametrize(("placement", "roles", "options"), WAYS, ids=[f"{p}-{r[0]}-{len(o)}" for p, r, o in WAYS])
async def test_every_policy_answers_long_and_short_requests(
    placement: str, roles: tuple[Role, ...], options: dict[str, object]
) -> None:
    fake = FakeCluster(run_s=0.002, token_s=0.0005, send_s=0.0005)
    name, _, in_place = placement.partition("-in-")
    async with running(fake, roles, name, options, bool(in_place)) as client:
        lengths = (400, 20, 3, 150, 60, 333, 1, 500, 30, 99, 260, 7)
        prompts = [prompt(seed, length) for seed, length in enumerate(lengths)]
        counts = [1 if seed % 5 == 4 else 6 for seed in range(len(prompts))]
        asks = []
        for seed, ids in enumerate(prompts):
            asks.append(asyncio.create_task(ask(client, f"r{seed}", ids, counts[seed])))
            await virtual_time.pause(0.001)
        answers = await asyncio.wait_for(asyncio.gather(*asks), 20)
        assert answers == [answer(ids, count) for ids, count in zip(prompts, counts, strict=True)]
        if options.get("sp") == 2 or options.get("long_sp") == 2:
            assert any(len(message.run.group) == 2 for message in fake.said(ComputeSpan))
        if roles is APART and placement != "fifo":
            assert {message.to for message in fake.said(SendKv)} >= {2}


@pytest.mark.parametrize(("placement", "roles", "options"), WAYS, ids=[f"{p}-{r[0]}-{len(o)}" for p, r, o in WAYS])
@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    kills=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 25)), min_size=1, max_size=5),
    leaves=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 25)), max_size=3),
)
def test_no_answer_is_lost_or_changed_when_instances_die_or_leave(
    placement: str,
    roles: tuple[Role, ...],
    options: dict[str, object],
    kills: list[tuple[int, int]],
    leaves: list[tuple[int, int]],
) -> None:
    async def run() -> None:
        fake = FakeCluster(run_s=0.002, token_s=0.0005, send_s=0.001)
        name, _, in_place = placement.partition("-in-")
        async with running(fake, roles, name, options, bool(in_place)) as client:
            prompts = [prompt(seed, length) for seed, length in enumerate((400, 20, 150, 3, 333, 60, 500, 99, 1))]
            asks = []
            for seed, ids in enumerate(prompts):
                asks.append(asyncio.create_task(ask(client, f"r{seed}", ids, 8)))
                await run_ready_tasks(1)
            for at in range(26):
                for number, when in kills:
                    if when == at:
                        fake.kill(number)
                for number, when in leaves:
                    if when == at:
                        asks[number].cancel()
                await virtual_time.pause(0.001)
            answers = await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), 20)
            left = {number for number, _ in leaves}
            for number, (said, ids) in enumerate(zip(answers, prompts, strict=True)):
                if number not in left:
                    assert said == answer(ids, 8)

    virtual_time.run(run())
