"""Two network namespaces as two hosts, a virtual cable between them, and processes on either."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TOKEN = "a-token-of-the-tests"
NODE0 = "10.77.0.1"
_NEWNET = 0x40000000


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

    def __init__(self, namespace: str, *words: str, token: str = TOKEN) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *words],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HEADWAY_RDZV_TOKEN": token},
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
