"""An engine process that is killed or hangs: the server starts another, and streams go on where they were."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.helpers.fake_executor import answer
from tests.helpers.polling import eventually, run_ready_tasks

from headway.core.errors import UnavailableError
from headway.core.request import SamplingParams
from headway.runtime.engine.client import ProcessEngineClient
from headway.runtime.engine.config import EngineConfig, accumulate_counters
from headway.runtime.engine.process import EngineProcess, start_engine
from headway.runtime.engine.protocol import EngineStats, OutputDelta, SubmitRequest

FAKE = "tests.helpers.fake_engine_process"


@asynccontextmanager
async def serving(model: str = "fake", **fields: float) -> AsyncIterator[ProcessEngineClient]:
    """A client whose engine has started."""
    client = ProcessEngineClient(EngineConfig(model=model, **fields), module=FAKE, template_module=FAKE)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def stream(client: ProcessEngineClient, name: str, prompt: list[int], count: int = 8) -> AsyncIterator[OutputDelta]:
    params = SamplingParams(max_tokens=count)
    return client.generate(
        SubmitRequest(id=name, prompt_tokens=len(prompt), params=params, received_s=time.monotonic()),
        array("i", prompt).tobytes(),
    )


async def tokens(deltas: AsyncIterator[OutputDelta], some: int = 10**9) -> list[int]:
    told: list[int] = []
    while len(told) < some:
        try:
            told += (await anext(deltas)).tokens
        except StopAsyncIteration:
            break
    return told


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
async def test_streams_continue_after_an_engine_restart(fault: signal.Signals) -> None:
    async with serving(engine_timeout_s=1.0) as client:
        prompts = {f"r{i}": [i, 2 * i + 1] * (1 + i) for i in range(8)}
        streams = {name: stream(client, name, prompt, 3_000) for name, prompt in prompts.items()}
        told = {name: await tokens(one, 3) for name, one in streams.items()}
        counted = client.stats.decode_tokens_total
        pid = client.pid
        os.kill(pid, fault)
        await eventually(lambda: client.state != "ready")
        assert client.state == "recovering"
        late = asyncio.create_task(tokens(stream(client, "late", [9], 5)))
        gone = stream(client, "left", [8], 10**6)
        leaving = asyncio.create_task(anext(gone))
        await run_ready_tasks()
        leaving.cancel()
        for name, one in streams.items():
            told[name] += await tokens(one)
            assert told[name] == answer(prompts[name], 3_000), name
        assert await late == answer([9], 5)
        assert client.pid != pid
        await client.drain()
        assert client.stats.engine_restarts_total == 1
        assert client.stats.decode_tokens_total >= counted


async def test_an_iteration_that_never_ends_is_noticed_though_heartbeats_come() -> None:
    async with serving(model="stuck", worker_timeout_s=1.0) as client:
        assert await tokens(stream(client, "a", [1, 2], 100)) == answer([1, 2], 100)
        assert client.stats.engine_restarts_total == 1


async def test_draining_goes_on_after_a_restart() -> None:
    async with serving() as client:
        one = stream(client, "a", [1, 2], 3_000)
        told = await tokens(one, 2)
        draining = asyncio.create_task(client.drain())
        await run_ready_tasks()
        os.kill(client.pid, signal.SIGKILL)
        assert told + await tokens(one) == answer([1, 2], 3_000)
        await draining
        with pytest.raises(UnavailableError):
            await tokens(stream(client, "late", [1], 1))


async def test_an_engine_that_dies_again_and_again_is_given_up() -> None:
    async with serving(max_restarts=1) as client:
        one = stream(client, "a", [1, 2], 10**7)
        await tokens(one, 2)
        first = client.pid
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: client.pid != first and client.state == "ready")
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"has ended with signal 9 .*; the engine started again 1 times"):
            await tokens(one)
        assert client.state == "lost"
        assert "the engine started again 1 times within 60 s of running" in (client.failure or "")


async def test_an_engine_that_cannot_be_started_again_ends_what_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    async with serving() as client:
        one = stream(client, "a", [1, 2], 10**7)
        await tokens(one, 2)
        draining = asyncio.create_task(client.drain())
        monkeypatch.setattr("headway.runtime.launcher.processes.subprocess.Popen", refuse)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="Cannot allocate memory"):
            await tokens(one)
        await draining
        assert client.state == "lost"
        assert "Cannot allocate memory" in (client.failure or "")


async def test_an_engine_with_unreadable_messages_is_ended() -> None:
    async with serving(model="garbles") as client:
        with pytest.raises(UnavailableError, match="cannot be looked after"):
            await tokens(stream(client, "a", [1, 2], 10**7))
        assert client.state == "lost"
        await eventually(lambda: client._engine.process.process.ended is not None)
        await client.drain()


async def test_a_restart_that_cannot_load_is_not_the_last() -> None:
    async with serving(model="stumbles", max_restarts=2) as client:
        one = stream(client, "a", [1, 2], 3_000)
        told = await tokens(one, 2)
        os.kill(client.pid, signal.SIGKILL)
        assert told + await tokens(one) == answer([1, 2], 3_000)
        assert client.stats.engine_restarts_total == 2


async def test_a_restart_that_never_loads_is_given_up_with_its_own_error() -> None:
    async with serving(model="stumbles", max_restarts=1) as client:
        one = stream(client, "a", [1, 2], 10**7)
        await tokens(one, 2)
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="the cache does not fit; the engine started again 1 times"):
            await tokens(one)


async def test_a_restarted_engine_has_the_cache_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []

    def spied(config: EngineConfig, *rest: object, **named: object) -> EngineProcess:
        seen.append(config)
        return start_engine(config, *rest, **named)

    monkeypatch.setattr("headway.runtime.engine.client.start_engine", spied)

    async with serving() as client:
        for _ in range(2):
            pid = client.pid
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda pid=pid: client.pid != pid and client.state == "ready")
        assert client.info.kv_bytes == 4
        assert [config.kv_cache_bytes for config in seen] == [None, 4, 4]


async def test_a_final_error_of_a_dying_engine_is_final() -> None:
    async with serving(model="worn") as client:
        with pytest.raises(UnavailableError, match="the workers were lost 4 times in a row"):
            await tokens(stream(client, "a", [1, 2], 10**7))
        assert client.state == "lost"
        assert client.failure == "the workers were lost 4 times in a row"
        assert client.stats.engine_restarts_total == 0


def test_counters_never_fall() -> None:
    one = EngineStats(iterations_total=5, running=3, kv_tokens_total=64, stage_busy_s=((0, 0, 1.5),))
    base = accumulate_counters(one, EngineStats(engine_restarts_total=1))
    two = accumulate_counters(
        base, EngineStats(iterations_total=2, running=1, kv_tokens_total=64, stage_busy_s=((0, 0, 1.0),))
    )
    assert (two.iterations_total, two.running, two.kv_tokens_total, two.engine_restarts_total) == (7, 1, 64, 1)
    assert two.stage_busy_s == ((0, 0, 2.5),)
