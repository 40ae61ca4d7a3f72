"""Two network namespaces as two hosts, a virtual cable between them, and processes on either."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.helpers.polling import until

ROOT = Path(__file__).parents[2]
BESIDE = ROOT / ".ray"
"""Where `make ray` installs it."""
TOKEN = "a-token-of-the-tests"
NODE0 = "10.77.0.1"
RAY_ADDRESS = f"{NODE0}:6379"
_NEWNET = 0x40000000
_RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block", "--num-cpus", "2")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """Namespaces `a` (10.77.0.1) and `b` (10.77.0.2)."""

    def __init__(self) -> None:
        self.a, self.b = f"headway-{os.getpid()}-a", f"headway-{os.getpid()}-b"
        self._link = f"hw{os.getpid()}a"

    def make(self) -> None:
        for name in (self.a, self.b):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        other = self._link[:-1] + "b"
        ip("-n", self.a, "link", "add", self._link, "type", "veth", "peer", "name", other, "netns", self.b)
        for name, link, address in ((self.a, self._link, f"{NODE0}/24"), (self.b, other, "10.77.0.2/24")):
            ip("-n", name, "addr", "add", address, "dev", link)
            ip("-n", name, "link", "set", link, "up")

    def cable(self, state: str) -> None:
        """`up` or `down`."""
        ip("-n", self.a, "link", "set", self._link, state)

    @contextmanager
    def slow(self, mbit_s: int) -> Iterator[None]:
        """What leaves `a` is carried no faster. Skips the test where that cannot be had."""
        here = "tc", "-n", self.a, "qdisc"
        limits = "tbf", "rate", f"{mbit_s}mbit", "burst", "32k", "latency", "100ms"
        try:
            subprocess.run([*here, "add", "dev", self._link, "root", *limits], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"a slow cable needs `tc` and a token bucket: {error}")
        try:
            yield
        finally:
            subprocess.run([*here, "del", "dev", self._link, "root"], check=True)

    def pids(self, name: str) -> list[int]:
        """The processes on a host."""
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self, name: str) -> None:
        """Kill all that runs on a host."""
        for pid in self.pids(name):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        until(lambda: not self.pids(name))

    def remove(self) -> None:
        for name in (self.a, self.b):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Skips the test where there can be none."""
    if shutil.which("ip") is None:
        pytest.skip("two hosts need network namespaces, and there is no `ip` (iproute2) to make them with")
    hosts = Hosts()
    try:
        hosts.make()
    except OSError as error:
        hosts.remove()
        pytest.skip(f"two hosts need network namespaces, which cannot be made here: {error}")
    try:
        yield hosts
    finally:
        hosts.remove()


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread, and threads and processes that it starts meanwhile, are on that host."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> None:
        with Path(path).open("rb") as file:
            if libc.setns(file.fileno(), _NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {path}")

    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    enter(f"/run/netns/{namespace}")
    try:
        yield
    finally:
        enter(f"/proc/self/fd/{outside}")
        os.close(outside)


class Running:
    """A command on a host."""

    def __init__(self, namespace: str, *words: str, variables: Mapping[str, str] = os.environ) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *words],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=dict(variables),
            start_new_session=True,
        )

    @property
    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def terminate(self) -> None:
        self.process.terminate()

    def ended(self, timeout_s: float = 10.0) -> int:
        return self.process.wait(timeout_s)

    def remove(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


def environment() -> dict[str, str]:
    """Return the environment of processes that use Ray, with its token authentication. Skips the test without Ray."""
    if find_spec("ray") is None and not (BESIDE / "ray").is_dir():
        pytest.skip("needs Ray, in this environment or in .ray: make ray")
    paths = [str(ROOT), *([str(BESIDE)] if BESIDE.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
    }


class RayOnHosts:
    """A node of Ray on each host; `a` has the head, at `RAY_ADDRESS`."""

    def __init__(self, hosts: Hosts) -> None:
        self.variables = environment()
        self._hosts = hosts
        self._running: list[Running] = []

    def start(self) -> None:
        """Start a node on either host."""
        head = "--head", "--node-ip-address", NODE0, "--port", "6379", "--include-dashboard", "false"
        self._start(self._hosts.a, *head)
        self.start_other()

    def start_other(self) -> None:
        """Start the node on `b`."""
        self._start(self._hosts.b, "--address", RAY_ADDRESS, "--node-ip-address", "10.77.0.2")

    def kill_other(self) -> None:
        """Kill the node on `b`, with all that runs there."""
        self._hosts.kill(self._hosts.b)

    def remove(self) -> None:
        for name in (self._hosts.a, self._hosts.b):
            self._hosts.kill(name)
        for one in self._running:
            one.remove()

    def _start(self, namespace: str, *words: str) -> None:
        words = (*_RAY, "--object-store-memory", str(80 << 20), *words)
        node = Running(namespace, *words, variables=self.variables)
        self._running.append(node)

        def started() -> bool:
            assert node.process.poll() is None, node.said
            return "Ray runtime started" in node.said

        until(started, 120.0)


@contextmanager
def ray_on(hosts: Hosts) -> Iterator[RayOnHosts]:
    """Skips the test without Ray."""
    ray = RayOnHosts(hosts)
    try:
        ray.start()
        yield ray
    finally:
        ray.remove()
