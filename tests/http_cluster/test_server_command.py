"""Servers that the cluster starts: they are found, started again after a crash, and never outlive the cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.polling import until
from tests.helpers.process_tree import is_running
from tests.http_cluster.http_world import RATES, ask
from tests.http_cluster.token_server import greedy

from headway.core.errors import ConfigError
from headway.core.machine import free_port
from headway.runtime.assembly.cluster import http_cluster
from headway.runtime.cluster.client import ClusterClient
from headway.runtime.cluster.cluster_file import cluster_file
from headway.runtime.cluster.server_command import ServerCommand
from headway.runtime.embedded import model_path

SERVER = f"{sys.executable} -m tests.http_cluster.token_server {{port}}"


def cluster(command: str, folder: Path, count: int = 2) -> ClusterClient:
    data = {"pools": [{"backend": "vllm", "count": count, "command": command}]}
    file = cluster_file(data, "c")
    return http_cluster(file, str(model_path()), folder, RATES)


async def test_servers_are_started_again_after_a_kill_and_ended_with_the_cluster(tmp_path: Path) -> None:
    made = cluster(SERVER, tmp_path)
    await made.start()
    pids = [each.pid for each in made.report().instances]
    assert await ask(made, "r", [5, 6], 10) == greedy([5, 6], 10)
    os.kill(pids[0], signal.SIGKILL)
    assert await ask(made, "s", [5, 7], 10) == greedy([5, 7], 10)
    async with asyncio.timeout(60):
        while made.report().instances[0].restarts_total == 0 or made.report().instances[0].state != "ready":
            await asyncio.sleep(0.02)
    pids += [each.pid for each in made.report().instances]
    await made.close()
    assert len(set(pids)) == 3
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize(
    ("command", "words"),
    [("no-such-program", "no-such-program: No such file"), (f"{sys.executable} -c 'print(7); exit(3)'", "7")],
)
async def test_a_server_that_does_not_start_is_an_error_with_its_last_words(
    tmp_path: Path, command: str, words: str
) -> None:
    made = cluster(command, tmp_path, 1)
    try:
        with pytest.raises(ConfigError, match=f"(?s)instance 0: the server has ended; it wrote:.*{words}"):
            await made.start()
        assert made.failure is not None
    finally:
        await made.close()


def test_a_server_ends_with_a_cluster_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib
from headway.runtime.cluster.server_command import ServerCommand
async def work():
    server = ServerCommand(["sleep", "1000"], 1, pathlib.Path({str(tmp_path / "log")!r}))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(work())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    until(lambda: "sleep" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0], 30, "it does not begin")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not is_running(pid), 30, "the server is left behind")


async def test_a_process_that_ignores_the_first_signal_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.runtime.cluster.server_command._GRACE_S", 0.2)
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )

    server = ServerCommand([sys.executable, "-c", program], free_port(), tmp_path / "log")
    await server.start()
    while "up" not in (tmp_path / "log").read_text():
        await asyncio.sleep(0.02)
    await server.stop()
    assert server.ended
    assert not is_running(server.pid)
