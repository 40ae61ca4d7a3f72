"""The router over instances that keep books of KV: every policy, every answer whole, nothing left behind.

What instances and clients that go at any time change: `test_router_fuzz`.
"""

from __future__ import annotations

import asyncio

import pytest
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
