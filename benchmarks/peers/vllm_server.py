"""Start vLLM's OpenAI server on CPU for a benchmark, stock or with Headway's scheduler, and stop it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from headway.core.machine import free_port


def flags_of(run: str) -> list[str]:
    """vLLM's arguments for a run: `default`, a threshold in tokens (`512`), `headway`, or `headway:AIM_MS`."""
    if run == "default":
        return []
    kind, _, aim = run.partition(":")
    if kind == "headway":
        settings = {"headway": {"t_target_ms": float(aim)} if aim else {}}
        return [
            "--scheduler-cls", "headway.vllm.Scheduler", "--middleware", "headway.vllm.SloMiddleware",
            "--additional-config", json.dumps(settings),
        ]  # fmt: skip
    return ["--long-prefill-token-threshold", str(int(run))]


def environment(
    python: str,
    *,
    kv_gib: int = 4,
    threads: int = 0,
    first_core: int = 0,
    variables: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment variables of a process that runs vLLM on CPU. threads 0: all cores."""
    # pip puts Intel's OpenMP beside `bin`; vLLM's kernels are two to three times slower without it.
    openmp = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    found = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": _range(first_core, threads or os.cpu_count() or 1),
        "VLLM_NO_USAGE_STATS": "1",
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        **(variables or {}),
    }
    found.pop("OMP_NUM_THREADS", None)
    return found


class VllmServer:
    """A server on 127.0.0.1 and what starts it, with the processes that it starts as a group of its own."""

    def __init__(
        self,
        python: str,
        model: str,
        flags: Sequence[str],
        log: Path,
        *,
        dtype: str,
        max_model_len: int,
        kv_gib: int = 4,
        threads: int = 0,
        first_core: int = 0,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """threads 0: all cores. variables: of its environment, besides."""
        self.port, self.log = free_port(), log
        self.command = [
            str(Path(python).parent / "vllm"), "serve", model, "--served-model-name", "peer", "--host", "127.0.0.1",
            "--port", str(self.port), "--dtype", dtype, "--max-model-len", str(max_model_len), *flags,
        ]  # fmt: skip
        self._environment = environment(
            python, kv_gib=kv_gib, threads=threads, first_core=first_core, variables=variables
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it is ready. A signal to the group reaches its engine too."""
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self.command, stdout=sink, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        _wait(self._process, self.port, self.log)

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def cpu_s(self) -> float:
        """Return the CPU seconds that its processes have taken."""
        taken = 0.0
        if self._process is None:
            return taken
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                # Fields after the name: state, parent, group, …, user and system time in ticks.
                fields = file.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:
                    taken += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return taken

    def kill(self) -> None:
        """Kill all of its processes at once."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        # The server first, then what it may have left behind.
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait()
        self._process = None


def busy_s() -> float:
    """Return the CPU seconds for which this machine's cores were not idle, or the host's other guests had them."""
    user, nice, system, _idle, _waiting, interrupts, soft, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + interrupts + soft + steal) / os.sysconf("SC_CLK_TCK")


@contextmanager
def vllm_server(
    python: str, model: str, flags: Sequence[str], *, log: Path | None = None, **settings: Any
) -> Iterator[str]:
    """The URL of a server that is ready and ends with the block. settings: of `VllmServer`.

    On a machine that does other work take one thread: several wait for each other in every operator.
    """
    with tempfile.TemporaryDirectory() as folder:
        server = VllmServer(python, model, flags, log or Path(folder) / "server.log", **settings)
        try:
            server.start()
            yield server.url
        finally:
            server.stop()


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
