"""Engines forked from a template: one that is lost is replaced without loading, and streams go on where they were."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from tests.engine.test_engine_restarts import FAKE, serving, stream, tokens
from tests.helpers.fake_executor import answer
from tests.helpers.marks import quick_first
from tests.helpers.polling import eventually, until
from tests.helpers.process_tree import child_pids, ends_soon

from headway.core.errors import ConfigError
from headway.core.request import SamplingParams
from headway.perf.device import CudaReport
from headway.runtime.assembly import template_process
from headway.runtime.assembly.engine import remembered
from headway.runtime.embedded import model_path
from headway.runtime.engine.client import ProcessEngineClient
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.protocol import SubmitRequest
from headway.runtime.launcher import standby as engine_template
from headway.runtime.launcher.standby import EngineTemplate, ForkedEngine, TemplatePool


def template_pid(client: ProcessEngineClient) -> int:
    assert client._template is not None
    process = client._template._process
    assert process is not None
    return process.pid


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_go_on_in_another_fork_of_the_same_template(fault: signal.Signals) -> None:
    async with serving(standby=True, engine_timeout_s=1.0) as client:
        prompts = {f"r{i}": [i, 2 * i + 1] * (1 + i) for i in range(4)}
        streams = {name: stream(client, name, prompt, 3_000) for name, prompt in prompts.items()}
        received = {name: await tokens(one, 3) for name, one in streams.items()}
        template, engine = template_pid(client), client.pid
        assert child_pids(template) == [engine]
        os.kill(engine, fault)
        for name, one in streams.items():
            received[name] += await tokens(one)
            assert received[name] == answer(prompts[name], 3_000), name
        # All may have been computed before the engine was stopped; that it is silent is noticed later then.
        await eventually(lambda: client.pid not in (0, engine))
        assert template_pid(client) == template
        assert ends_soon(engine)
        await eventually(lambda: client.stats.engine_restarts_total == 1)


async def test_a_killed_template_is_replaced_while_its_engine_goes_on() -> None:
    async with serving(standby=True) as client:
        one = stream(client, "a", [1, 2], 3_000)
        received = await tokens(one, 3)
        template, engine = template_pid(client), client.pid
        os.kill(template, signal.SIGKILL)
        await eventually(lambda: template_pid(client) != template and client._template.loaded)
        received += await tokens(one, 3)
        assert (client.pid, client.stats.engine_restarts_total) == (engine, 0)
        os.kill(engine, signal.SIGKILL)
        assert received + await tokens(one) == answer([1, 2], 3_000)
        # All may have been computed before the engine was killed.
        await eventually(lambda: client.pid not in (0, engine))
        assert child_pids(template_pid(client)) == [client.pid]


def test_a_template_that_ends_while_it_loads_leaves_no_zombie() -> None:
    template = EngineTemplate(EngineConfig(model="fake", standby=True), FAKE)
    assert template._process is not None
    pid = template._process.pid
    os.kill(pid, signal.SIGKILL)
    try:
        # As the server does, every tenth of a second.
        until(lambda: template.keep() or not Path(f"/proc/{pid}").exists(), what="the zombie stays")
    finally:
        template.kill()


async def test_an_engine_whose_template_was_killed_drains_and_nothing_is_left_behind() -> None:
    pids: list[int] = []

    async with serving(standby=True) as client:
        template = template_pid(client)
        os.kill(template, signal.SIGKILL)
        await eventually(lambda: template_pid(client) != template)
        pids.extend((template_pid(client), client.pid))
        await client.drain()
        assert client.failure is None
    assert all(ends_soon(pid) for pid in pids)


SERVER = """
import asyncio, os, signal
from headway.runtime.engine.client import ProcessEngineClient
from headway.runtime.engine.config import EngineConfig

async def main():
    config = EngineConfig(model="fake", standby=KIND != "process")
    fake = "tests.helpers.fake_engine_process"
    client = ProcessEngineClient(config, module=fake, template_module=fake)
    await client.start()
    print(client.pid, flush=True)
    if KIND == "fork without its template":
        client._template.kill()
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", quick_first(["process", "fork", "fork without its template"]))
def test_an_engine_ends_when_its_server_is_killed(kind: str) -> None:
    command = [sys.executable, "-c", SERVER.replace("KIND", repr(kind))]
    # pytest's own folders have paths too long for a socket.
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=60, check=False, text=True)
        assert done.returncode == -signal.SIGKILL
        assert ends_soon(int(done.stdout), 30.0)


async def test_the_first_process_of_a_container_reaps_an_engine_whose_template_was_killed() -> None:
    adopt, libc = 36, ctypes.CDLL(None)  # PR_SET_CHILD_SUBREAPER: orphans become children, as the first process's do
    libc.prctl(adopt, 1)

    try:
        async with serving(standby=True) as client:
            template, engine = template_pid(client), client.pid
            os.kill(template, signal.SIGKILL)
            await eventually(lambda: template_pid(client) != template)
            os.kill(engine, signal.SIGTERM)
            await eventually(lambda: client.pid not in (0, engine))
            assert not Path(f"/proc/{engine}").exists()
    finally:
        libc.prctl(adopt, 0)


def test_an_adopted_engine_is_reaped_after_its_exit_status_was_read() -> None:
    reading, writing = os.pipe()
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.write(writing, b"process %d\nexit 3\n" % pid)
    engine = ForkedEngine(cast(EngineTemplate, SimpleNamespace(loaded=True)), reading)
    assert engine.poll() == 3
    os.close(writing)
    # The new process may have the pipe for a moment after it was started.
    until(lambda: engine.poll() == 3 and not Path(f"/proc/{pid}").exists())
    assert engine.poll() == 3


def test_an_engine_that_ends_while_its_template_loads_is_not_waited_for(tmp_path: Path) -> None:
    template = EngineTemplate(EngineConfig(model="slow", measured=str(tmp_path / "go")), FAKE)
    try:
        given_up = [template.fork(f"ipc://{tmp_path}/{name}", EngineConfig(model="slow")) for name in "ab"]
        given_up[0].terminate()
        given_up[1].kill()
        assert [engine.poll() for engine in given_up] == [-signal.SIGKILL] * 2
        engine = template.fork(f"ipc://{tmp_path}/c", EngineConfig(model="slow"))
        (tmp_path / "go").touch()
        until(lambda: engine.poll() is None and engine.pid)
        assert child_pids(template._process.pid) == [engine.pid]
        engine.kill()
        engine.join(20.0)
        assert engine.poll() == -signal.SIGKILL
    finally:
        template.kill()


@pytest.mark.long
async def test_a_stopped_template_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.launcher.standby._ANSWER_S", 0.3)

    async with serving(standby=True) as client:
        one = stream(client, "a", [1, 2], 3_000)
        received = await tokens(one, 3)
        os.kill(template_pid(client), signal.SIGSTOP)
        os.kill(client.pid, signal.SIGKILL)
        assert received + await tokens(one) == answer([1, 2], 3_000)


def test_a_model_that_cannot_be_loaded_is_reported_in_its_own_words() -> None:
    async def refused() -> None:
        config = EngineConfig(model="foreseen", standby=True)
        client = ProcessEngineClient(config, template_module=FAKE)
        try:
            with pytest.raises(ConfigError, match="the checkpoint has no tensors"):
                async with asyncio.timeout(60):
                    await client.start()
        finally:
            await client.close()

    asyncio.run(refused())


@pytest.mark.parametrize(
    "fields", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "nnodes": 2, "ray_address": "auto"}]
)
def test_standby_needs_an_engine_of_one_process(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="leave out the parallel sizes and nnodes, or standby"):
        EngineConfig(model="m", standby=True, **fields)


@pytest.mark.long
def test_the_embedded_model_answers_the_same_in_a_fork_as_in_a_process_of_its_own() -> None:
    async def generate(standby: bool) -> list[int]:
        client = ProcessEngineClient(EngineConfig(model=str(model_path()), threads=2, standby=standby))
        received: list[int] = []
        try:
            async with asyncio.timeout(120):
                await client.start()
                request = SubmitRequest(
                    id="a",
                    prompt_tokens=300,
                    params=SamplingParams(max_tokens=400, ignore_eos=True),
                    received_s=time.monotonic(),
                )
                async for delta in client.generate(request, array("i", range(3, 303)).tobytes()):
                    received += delta.tokens
                    if standby and len(received) in (50, 200):
                        pid = client.pid
                        os.kill(pid, signal.SIGKILL)
                        await eventually(lambda pid=pid: client.pid not in (0, pid))
        finally:
            await client.close()
        assert client.stats.engine_restarts_total == (2 if standby else 0)
        return received

    assert asyncio.run(generate(True)) == asyncio.run(generate(False))


def test_a_template_refuses_a_gpu_before_it_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(template_process, "look", lambda: CudaReport("2.9", True, ("H100",), (1 << 36,)))
    with pytest.raises(ConfigError, match="which CUDA does not allow"):
        template_process.load_model(EngineConfig(model=str(tmp_path), device="cuda"))


def test_a_template_that_died_before_its_settings_were_known_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_template, "TEMPLATE", FAKE)
    engine_template.start_early()
    early = engine_template._early[0]
    os.kill(early.pid, signal.SIGKILL)
    until(lambda: early.ended)
    template = EngineTemplate(EngineConfig(model="fake"), FAKE)
    try:
        until(lambda: template.loaded)
    finally:
        template.kill()
    assert engine_template._early == []


@pytest.mark.parametrize("why", ["too often", "too little memory"])
def test_a_template_is_not_started_again_before_it_is_needed(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if why == "too often":
        monkeypatch.setattr(engine_template, "_EARLY_RESTARTS", 1)
    else:
        monkeypatch.setattr(engine_template, "available_bytes", lambda: 100)
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    template = EngineTemplate(EngineConfig(model=str(tmp_path)), FAKE)

    def lose() -> None:
        until(lambda: template.loaded)
        process = template._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: process.ended)
        template.keep()

    try:
        lose()
        if why == "too often":
            assert template._process is not None
            lose()
        template.keep()
        assert template._process is None
        engine = template.fork(f"ipc://{tmp_path}/e", EngineConfig(model=str(tmp_path)))
        until(lambda: engine.poll() is None and engine.pid)
        engine.kill()
    finally:
        template.kill()


def test_instances_of_one_model_share_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started:
        def __init__(self, config: EngineConfig) -> None:
            self.config, self.killed = config, False

        def kill(self) -> None:
            self.killed = True

    monkeypatch.setattr("headway.runtime.launcher.standby.EngineTemplate", Started)
    pool = TemplatePool()
    one = pool.of(EngineConfig(model="m", standby=True, threads=1))
    assert pool.of(EngineConfig(model="m", standby=True, threads=2, kv_cache_bytes=1 << 20)) is one
    other = pool.of(EngineConfig(model="m", standby=True, dtype="bfloat16"))
    assert other is not one
    assert one.config.instance is not None
    assert pool.of(EngineConfig(model="m")) is None
    pool.close()
    assert [template.killed for template in (one, other)] == [True, True]


def test_what_an_engine_measures_at_its_start_is_kept_for_the_next(tmp_path: Path) -> None:
    file, measured = str(tmp_path / "kept.json"), iter([3, 4])
    assert remembered(file, int, lambda: next(measured)) == 3
    assert remembered(file, int, lambda: next(measured)) == 3
    (tmp_path / "kept.json").write_text("{")
    assert remembered(file, int, lambda: next(measured)) == 4, "a damaged file is measured anew"
    assert remembered(None, int, lambda: 5) == 5
