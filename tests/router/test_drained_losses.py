"""An instance that dies while it is drained, or is the last to leave: what operators see."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.polling import eventually
from tests.router import virtual_time
from tests.router.cluster_clients import ask, prompt, router, running
from tests.router.fake_instances import FakeCluster, FakeProcess, answer

from headway.core.errors import UnavailableError
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.protocol import ComputeSpan, SubmitRequest


async def test_an_instance_that_dies_while_draining_counts_as_left() -> None:
    fake = FakeCluster(token_s=0.002)
    async with running(fake, ("mixed", "mixed"), "jsq") as client:
        asks = [asyncio.create_task(ask(client, f"a{n}", prompt(n, 30), 40)) for n in range(4)]
        await eventually(
            lambda: {number for number, message in fake.log if isinstance(message, SubmitRequest)} == {0, 1}
        )
        assert client.leave(0).state == "draining"
        fake.kill(0)
        await eventually(lambda: [each.id for each in client.report().instances] == [1])
        begun = len(fake.log)
        assert await asyncio.gather(*asks) == [answer(prompt(n, 30), 40) for n in range(4)]
        assert {number for number, m in fake.log[begun:] if isinstance(m, SubmitRequest | ComputeSpan)} <= {1}
        assert fake.processes[0].serial == 0, "it was not started again"
        assert client.join(0).incarnation == 1

        await eventually(lambda: client.report().instances[0].state == "ready")


async def test_a_cluster_without_instances_keeps_its_counters_and_can_be_joined() -> None:
    fake = FakeCluster(refuse=lambda number, serial: "no memory" if serial else None)
    client = router(fake, ("mixed",), "jsq")
    await client.start()
    assert await ask(client, "a", prompt(0, 20)) == answer(prompt(0, 20), 4)
    fake.kill(0)
    await eventually(lambda: client.report().instances[0].state == "failed")
    client.leave(0)
    await eventually(lambda: not client.report().instances)
    assert client.state == "lost"
    assert client.stats.running == client.stats.waiting == 0
    client.join(0)
    await eventually(lambda: client.state != "recovering")
    await client.close()


async def test_a_starting_instance_can_be_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    receive, end = FakeProcess.receive, FakeProcess.end
    waiting: dict[FakeProcess, asyncio.Task[object]] = {}

    async def waits(process: FakeProcess) -> object:
        waiting[process] = asyncio.ensure_future(receive(process))
        return await waiting[process]

    def ends(process: FakeProcess, at_once: bool = False) -> None:
        end(process, at_once)
        if process in waiting:  # its socket is closed
            waiting[process].cancel()

    monkeypatch.setattr(FakeProcess, "receive", waits)
    monkeypatch.setattr(FakeProcess, "end", ends)

    fake = FakeCluster(start_s=30.0)
    async with running(fake, ("mixed", "mixed"), "jsq") as client:
        client.leave(1)
        await eventually(lambda: len(client.report().instances) == 1)
        assert client.join(0).id == 1
        await virtual_time.pause(0.01)
        assert client.report().instances[1].state == "starting"
        client.leave(1)
        await eventually(lambda: len(client.report().instances) == 1)
        assert client.join(0).incarnation == 2


async def test_an_instance_that_cannot_start_is_reported_and_not_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    def launcher(fake: FakeCluster, number: int) -> object:
        def launch(config: EngineConfig, serial: int) -> object:
            raise OSError(11, "Resource temporarily unavailable")

        return launch

    fake = FakeCluster()
    async with running(fake, ("mixed",), "jsq") as client:
        monkeypatch.setattr(FakeCluster, "launcher", launcher)
        with pytest.raises(UnavailableError, match=r"instance 1 cannot be started: .*temporarily unavailable"):
            client.join(0)
        assert [each.id for each in client.report().instances] == [0]
