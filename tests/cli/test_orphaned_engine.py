"""An engine process whose server died while the engine started ends instead of waiting for hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile

import msgspec

from headway.runtime import embedded
from headway.runtime.engine.config import EngineConfig


def test_an_engine_that_waits_for_hosts_ends_when_its_server_died_at_the_start() -> None:
    """The server's process id is an argument: the engine may have another parent before it can look up the first."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = EngineConfig(
        model=str(embedded.model_path()),
        pipeline_parallel_size=2,
        nnodes=2,
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_token="a-token-of-the-tests",
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = subprocess.Popen(
            [sys.executable, "-m", "headway.runtime.build.engine_process", f"ipc://{folder}/e", str(gone.pid)],
            stdin=subprocess.PIPE,
            env=dict(os.environ),
            start_new_session=True,
        )
        try:
            engine.communicate(msgspec.json.encode(config), timeout=60)
            assert engine.returncode == 1
        finally:
            engine.kill()
            engine.wait()
