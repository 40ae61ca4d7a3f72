"""The client and a real engine process, over a real socket; only the model is not real."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile

import msgspec
import pytest
from tests.engine.test_engine_restarts import FAKE, serving, stream, tokens
from tests.helpers.fake_executor import VOCAB, answer
from tests.helpers.polling import eventually, run_ready_tasks
from tests.helpers.process_tree import is_running

from headway.core.errors import ConfigError, OverloadedError, RequestError, UnavailableError
from headway.runtime.engine.client import ProcessEngineClient
from headway.runtime.engine.config import EngineConfig
from headway.runtime.launcher.processes import LocalProcess


def make_client(model: str = "fake", **fields: int) -> ProcessEngineClient:
    return ProcessEngineClient(EngineConfig(model=model, **fields), module=FAKE)


def gone(client: ProcessEngineClient) -> bool:
    return not is_running(client.pid) and not client._folder.path.exists()


async def test_a_prompt_of_a_million_tokens_arrives_intact_and_close_leaves_nothing() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(1_000_000)]

    async with serving() as client:
        assert await tokens(stream(client, "long", prompt, count=2)) == answer(prompt, 2)
        assert client.stats.prefill_tokens_total in (0, 1_000_000)
        assert not gone(client)
    assert gone(client)
    await client.close()


async def test_many_streams_at_once_are_not_mixed_up() -> None:
    prompts = {f"r{i}": [i, i + 1, 3 * i] * (1 + i % 40) for i in range(200)}

    async with serving() as client:
        lengths = {name: 1 + i % 50 for i, name in enumerate(prompts)}
        told = await asyncio.gather(
            *(tokens(stream(client, name, prompt, count=lengths[name])) for name, prompt in prompts.items())
        )
        assert told == [answer(prompt, lengths[name]) for name, prompt in prompts.items()]


async def test_closing_an_iterator_early_aborts_the_request_and_no_other() -> None:
    async with serving() as client:
        endless = stream(client, "endless", [1, 2], count=10**6)
        other = asyncio.create_task(tokens(stream(client, "other", [3, 4], count=500)))
        seen = [(await anext(endless)).tokens[0] for _ in range(3)]
        assert seen == answer([1, 2], 3)
        await endless.aclose()  # type: ignore[attr-defined]
        assert await other == answer([3, 4], 500)
        await client.drain()  # would take a million iterations otherwise
        assert client.stats.decode_tokens_total < 100_000
        assert client.stats.running == 0


async def test_refusals_arrive_as_the_errors_that_they_are() -> None:
    async with serving(max_queued_requests=1) as client:
        with pytest.raises(RequestError, match="token ids must be between") as refused:
            await tokens(stream(client, "bad", [VOCAB]))
        assert refused.value.param == "prompt"
        results = await asyncio.gather(
            *(tokens(stream(client, f"r{i}", [i] * 2000)) for i in range(300)), return_exceptions=True
        )
        kinds = {type(result) for result in results}
        assert kinds == {list, OverloadedError}
        assert all(r == answer([i] * 2000, 8) for i, r in enumerate(results) if isinstance(r, list))


async def test_an_id_in_use_is_refused_and_its_first_stream_goes_on() -> None:
    async with serving() as client:
        first = stream(client, "same", [1, 2], count=300)
        begun = list((await anext(first)).tokens)
        with pytest.raises(RequestError, match="'same' is in use"):
            await tokens(stream(client, "same", [3, 4]))
        assert begun + await tokens(first) == answer([1, 2], 300)


async def test_an_engine_that_may_not_start_again_fails_all_streams_and_holds_nothing() -> None:
    async with serving(max_restarts=0) as client:
        streams = [stream(client, f"r{i}", [i], count=10**6) for i in range(3)]
        for one in streams:
            await anext(one)
        await eventually(lambda: client.stats.running + client.stats.waiting >= 3)
        os.kill(client.pid, signal.SIGKILL)
        for one in streams:
            with pytest.raises(UnavailableError, match=r"has ended with signal 9 \(SIGKILL\)"):
                await tokens(one)
        assert client.state == "lost"
        with pytest.raises(UnavailableError, match=r"has ended with signal 9 \(SIGKILL\)"):
            await tokens(stream(client, "late", [1]))
        stats = client.stats
        assert (stats.running, stats.waiting, stats.kv_tokens_used, stats.kv_tokens_total) == (0, 0, 0, 0)
        assert not stats.recovering
        assert stats.iterations_total > 0, "what it did is counted"
        assert stats.decode_tokens_total > 0
        assert stats.prefill_tokens_total >= 3
        await client.drain()
    assert gone(client)


@pytest.mark.parametrize(
    ("model", "words"), [("foreseen", "the checkpoint has no tensors"), ("silent", "exit code 3 while starting")]
)
async def test_an_engine_that_cannot_start_fails_all_waiting_callers(model: str, words: str) -> None:
    client = make_client(model)
    try:
        assert client.state == "starting"
        results = await asyncio.gather(client.start(), client.start(), return_exceptions=True)
        assert [type(result) for result in results] == [ConfigError, ConfigError]
        with pytest.raises(ConfigError, match=words):
            await client.start()
        assert words in (client.failure or "")
        with pytest.raises(UnavailableError):
            await tokens(stream(client, "late", [1]))
    finally:
        await client.close()
    assert gone(client)


async def test_an_engine_that_hangs_while_starting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.engine.process.START_TIMEOUT_S", 0.5)

    client = make_client("hangs", worker_timeout_s=1)
    try:
        with pytest.raises(ConfigError, match=r"sent no heartbeat for 0.5 s: it hangs"):
            await client.start()
    finally:
        await client.close()
    assert gone(client)


async def test_start_may_be_awaited_by_two_and_again() -> None:
    client = make_client()
    try:
        with pytest.raises(UnavailableError, match="still starting"):
            _ = client.info
        one, two = await asyncio.gather(client.start(), client.start())
        assert one is two is client.info is await client.start()
        assert client.state == "ready"
        assert await tokens(stream(client, "a", [1])) == answer([1], 8)
    finally:
        await client.close()


async def test_closing_wakes_all_waiting_callers() -> None:
    client = make_client()
    starting = asyncio.create_task(client.start())
    await run_ready_tasks()  # it waits now
    await client.close()
    with pytest.raises(UnavailableError, match="closing"):
        await starting
    assert gone(client)
    async with serving() as second:
        endless = stream(second, "endless", [1], count=10**6)
        await anext(endless)
    with pytest.raises(UnavailableError, match="the server is ending"):
        await tokens(endless)


async def test_drain_finishes_what_was_accepted_and_the_engine_ends_by_itself() -> None:
    async with serving() as client:
        accepted = [stream(client, f"r{i}", [i] * 300, count=200) for i in range(5)]
        firsts = [list((await anext(one)).tokens) for one in accepted]
        rest = [asyncio.create_task(tokens(one)) for one in accepted]
        draining = asyncio.create_task(client.drain())
        await run_ready_tasks(1)
        with pytest.raises(UnavailableError, match="draining"):
            await tokens(stream(client, "late", [1]))
        await draining
        told = await asyncio.gather(*rest)
        assert [a + b for a, b in zip(firsts, told, strict=True)] == [answer([i] * 300, 200) for i in range(5)]
        process = client._engine.process.process
        assert isinstance(process, LocalProcess)
        assert process.poll() == 0


def test_an_engine_whose_parent_was_killed_before_it_could_look_ends() -> None:
    """As then: the process that started it is not its parent."""
    stranger = os.getppid()
    config = msgspec.json.encode(EngineConfig(model="fake"))
    # pytest's own folders have paths too long for a socket.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.helpers.fake_engine_process", f"ipc://{folder}/e", str(stranger)]
        assert subprocess.run(command, input=config, timeout=30, check=False).returncode == 0
