"""Start vLLM's OpenAI server on CPU for a benchmark, stock or with Headway's scheduler, and stop it again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


def flags_of(run: str) -> list[str]:
    """vLLM's arguments for a run: `default`, a threshold in tokens (`512`), or `headway:AIM_MS`."""
    if run == "default":
        return []
    if run.startswith("headway:"):
        settings = {"headway": {"t_target_ms": float(run.removeprefix("headway:"))}}
        return [
            "--scheduler-cls", "headway.vllm.Scheduler", "--middleware", "headway.vllm.SloMiddleware",
            "--additional-config", json.dumps(settings),
        ]  # fmt: skip
    return ["--long-prefill-token-threshold", str(int(run))]


@contextmanager
def vllm_server(
    python: str,
    model: str,
    flags: list[str],
    *,
    dtype: str,
    max_model_len: int,
    kv_gib: int = 4,
    threads: int = 0,
    first_core: int = 0,
    log: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The URL of a server that is ready. It listens on 127.0.0.1 only and ends with the block. `threads` 0: all cores.
    variables: of its environment, besides.

    On a machine that does other work take one thread: several wait for each other in every operator.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "peer",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--max-model-len", str(max_model_len), *flags,
    ]  # fmt: skip
    # pip puts Intel's OpenMP beside `bin`; vLLM's kernels are two to three times slower without it.
    openmp = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    cores = threads or os.cpu_count() or 1
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": _range(first_core, cores),
        "VLLM_NO_USAGE_STATS": "1",
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        **(variables or {}),
    }
    environment.pop("OMP_NUM_THREADS", None)
    with tempfile.TemporaryDirectory() as folder:
        path = log or Path(folder) / "server.log"
        with path.open("wb") as sink:
            server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(server, port, path)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@contextmanager
def entered_together(servers: Sequence[AbstractContextManager[str]]) -> Iterator[list[str]]:
    """The URLs of servers that start at the same time."""
    entered: list[AbstractContextManager[str]] = []

    def enter(server: AbstractContextManager[str]) -> str:
        url = server.__enter__()
        entered.append(server)
        return url

    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            urls = list(pool.map(enter, servers))
        yield urls
    finally:
        for server in entered:
            server.__exit__(None, None, None)


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"vLLM did not start:\n{log.read_text()[-4000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"vLLM was not ready in 600 s:\n{log.read_text()[-4000:]}")
