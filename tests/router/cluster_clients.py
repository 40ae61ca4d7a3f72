"""A router over instances that keep books of KV, for tests."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial

from tests.helpers.cluster_worlds import PerToken
from tests.router.fake_instances import FakeCluster, FakeProcess
from tests.router.virtual_time import loop_time, pause

from headway.core.errors import RequestError
from headway.core.request import SamplingParams
from headway.perf.hardware import NetworkLink, model
from headway.policy.placement.contract import ClusterLinks, Role, longest_request
from headway.policy.placement.registry import PolicyContext, make_placement
from headway.runtime.cluster.client import ClusterClient
from headway.runtime.cluster.driver import ClusterRules
from headway.runtime.cluster.instances import LiveInstance
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.protocol import EngineInfo, SubmitRequest

SHAPE = model("llama-3-8b")
HOST = NetworkLink(name="host", bytes_per_s=1e9, latency_s=0.0, source="test")
CONFIG = EngineConfig(model="fake", max_restarts=20)
LATENCY = PerToken(token_s=1e-5, fixed_s=1e-3)


def router(
    fake: FakeCluster,
    roles: Sequence[Role],
    placement: str,
    options: dict[str, object] | None = None,
    in_place: bool = False,
) -> ClusterClient:
    def rules(infos: Sequence[EngineInfo]) -> ClusterRules:
        around = PolicyContext(latency=LATENCY, shape=SHAPE, copies_prefixes=False)
        return ClusterRules(
            policy=lambda: make_placement(placement, around, options or {}),
            latency=LATENCY,
            shape=SHAPE,
            longest=partial(longest_request, placement, options or {}, False),
            rows=32,
        )

    def another(number: int, pool: int, incarnation: int, kv_bytes: int | None) -> LiveInstance:
        if pool:
            raise RequestError("pool 0 is the only one", "pool")
        fake.kv_bytes.append(kv_bytes)
        return LiveInstance(number, roles[0], 0, 0, CONFIG, fake.launcher(number), incarnation, clock=loop_time)

    instances = [LiveInstance(i, role, 0, 0, CONFIG, fake.launcher(i), clock=loop_time) for i, role in enumerate(roles)]
    links = ClusterLinks(inside=HOST, across=HOST)
    return ClusterClient(
        instances, links, rules, placement=placement, another=another, in_place=in_place, clock=loop_time
    )


@contextlib.asynccontextmanager
async def running(
    fake: FakeCluster,
    roles: Sequence[Role],
    placement: str,
    options: dict[str, object] | None = None,
    in_place: bool = False,
) -> AsyncGenerator[ClusterClient, None]:
    client = router(fake, roles, placement, options, in_place)
    await client.start()
    try:
        yield client
        await all_quiet(client, fake)
    finally:
        await client.close()
    assert not fake.complaints, fake.complaints[:3]


@contextlib.asynccontextmanager
async def beating(
    fake: FakeCluster, computed: int = 0, dumb: Callable[[FakeProcess], bool] = lambda process: False
) -> AsyncGenerator[None, None]:
    """Every living instance but those that are `dumb` says a snapshot ten times a second. computed: tokens that it
    has computed since the one before."""

    async def beat() -> None:
        while True:
            for process in list(fake.processes.values()):
                if process.alive and not dumb(process):
                    process.counted += computed
                    process.beat()
            await pause(0.1)

    beats = asyncio.create_task(beat())
    try:
        yield
    finally:
        beats.cancel()


async def all_quiet(client: ClusterClient, fake: FakeCluster) -> None:
    """Nothing is left of any request, here or there."""
    for _ in range(500):
        live = client._live
        assert live is not None
        left = [p.requests or p.runs or p.scheduled for p in fake.processes.values() if p.alive]
        if not any(left) and not live.requests.asked:
            break
        await pause(0.002)
    assert not live.requests.asked
    assert not live.controller.requests
    assert not list(live.requests.attempts)
    assert live.backend.moves.under_way == 0
    live.controller.queues.check()
    assert all(not lane for lane in live.controller.queues.waiting)
    assert not any(live.controller.state.residents)
    assert not any(client.registry.kv.on(number) for number in fake.processes)
    assert not live.backend.rooms.waiting
    assert [(p.number, p.requests, p.runs, p.scheduled) for p in fake.processes.values() if p.alive] == [
        (p.number, {}, {}, {}) for p in fake.processes.values() if p.alive
    ]
    assert not any(any(held.values()) for held in fake.kv.values()), "KV of nobody is kept"


async def ask(client: ClusterClient, name: str, prompt: list[int], count: int = 4, **fields: object) -> list[int]:
    submit = SubmitRequest(
        id=name,
        prompt_tokens=len(prompt),
        params=SamplingParams(max_tokens=count),
        received_s=asyncio.get_running_loop().time(),
        **fields,
    )
    data = array("i", prompt).tobytes()
    return [token async for delta in client.generate(submit, data) for token in delta.tokens]


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 300 for i in range(length)]
