"""Faults and attacks on a real server, and what a client beside them sees: longest gap of a stream, slowest `/health`.

Run: python -m benchmarks.faults [--only WORD] [--serve="--standby"]. Each fault has a server of its own on the embedded
model; `--serve`: flags of those whose processes are killed or stopped. A chat is streamed all the while; `gap` is the
longest time between two of its events during the fault, `quiet` the longest before it, `log` what the server wrote, in
characters (at most 4,000 are counted). Times in milliseconds, `lasted` in seconds; on a machine that does other things
they are upper bounds.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import http.client
import itertools
import json
import os
import shlex
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from headway.serving.load.convoy import SERVE, ServerProcess

QUIET_S = 2.0
JOURNAL = tempfile.TemporaryDirectory()
ENGLISH = "The quick brown fox, 12 years old, jumped over the lazy dog's house and didn't look back. "
MB = 1 << 20
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"


def connection(url: str, timeout: float = 120.0) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=timeout)


def post(url: str, body: dict[str, object], path: str) -> tuple[int, str]:
    """Send a request; return its status and the beginning of what it says."""
    one = connection(url)
    one.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = one.getresponse()
    text = answer.read().decode()
    one.close()
    return answer.status, text


def model(url: str) -> str:
    one = connection(url)
    one.request("GET", "/v1/models")
    name: str = json.loads(one.getresponse().read())["data"][0]["id"]
    one.close()
    return name


@dataclass
class Bystander:
    """A client that streams one chat after another and asks for `/health`, in two threads."""

    url: str
    model: str
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """When an event of a stream came, and when the next one of the same stream did, seconds."""
    healths: list[tuple[float, float]] = field(default_factory=list)
    """When `/health` was asked for, and how long it took, seconds; infinite when it failed."""
    failures: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Bystander:
        self._threads = [threading.Thread(target=work) for work in (self._chat, self._ask)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def gap_ms(self, since: float, until: float) -> float:
        """Longest time between two events of one stream, of which a part lies between these two times."""
        first = bisect.bisect_left(self.gaps, since, key=lambda gap: gap[1])
        inside = itertools.takewhile(lambda gap: gap[0] <= until, itertools.islice(self.gaps, first, None))
        return 1000.0 * max((after - before for before, after in inside), default=float("nan"))

    def health_ms(self, since: float, until: float) -> float:
        return 1000.0 * max((took for at, took in self.healths if since <= at <= until), default=float("nan"))

    def _chat(self) -> None:
        while not self._over.is_set():
            body = {"model": self.model, "prompt": [3, 4, 5], "max_tokens": 3000, "ignore_eos": True, "stream": True}
            one = connection(self.url, 30.0)
            try:
                one.request("POST", "/v1/completions", json.dumps(body))
                answer = one.getresponse()
                before = None
                while not self._over.is_set() and (line := answer.readline()):
                    if line.startswith(b"data: {"):
                        now = time.monotonic()
                        if before is not None:
                            self.gaps.append((before, now))
                        before = now
            except OSError as error:
                self.failures.append(f"chat: {error}")
                self._over.wait(0.2)
            finally:
                one.close()

    def _ask(self) -> None:
        while not self._over.wait(0.02):
            began = time.monotonic()
            one = connection(self.url, 30.0)
            try:
                one.request("GET", "/health")
                one.getresponse().read()
                self.healths.append((began, time.monotonic() - began))
            except OSError as error:
                self.failures.append(f"/health: {error}")
                self.healths.append((began, float("inf")))
            finally:
                one.close()


@dataclass(frozen=True)
class Fault:
    name: str
    attack: Callable[[str, str], str]
    """Called with the server's URL and model; returns what came of it."""
    flags: tuple[str, ...] = ()
    limits: str = ":"
    """Shell command that limits the server, such as `ulimit -n 256`."""


def prompts(*texts: str) -> Callable[[str, str], str]:
    """Send texts as prompts, all at once. They ask for too much output, so that none reaches the engine once tokenised:
    else its iterations beside a document's count as well."""

    def attack(url: str, name: str) -> str:
        said: list[str] = []

        def send(text: str) -> None:
            try:
                status, answer = post(url, {"model": name, "prompt": text, "max_tokens": 1 << 20}, "/v1/completions")
                said.append(f"{status} {answer[21:100]}")
            except OSError as error:
                said.append(str(error))

        threads = [threading.Thread(target=send, args=(text,)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return "; ".join(sorted(set(said)))[:100]

    return attack


def english(size: int) -> str:
    return (ENGLISH * (size // len(ENGLISH) + 1))[:size]


def connections(data: bytes, count: int = 600, lasting_s: float = 14.0) -> Callable[[str, str], str]:
    """Open connections, as many as there can be, send each a few bytes, and wait beyond the header time-out."""

    def attack(url: str, name: str) -> str:
        parts = urlsplit(url)
        made: list[socket.socket] = []
        for _ in range(count):
            with contextlib.suppress(OSError):
                one = socket.create_connection((parts.hostname, parts.port or 80), timeout=5)
                made.append(one)
                one.sendall(data)
        time.sleep(lasting_s)
        still = 0
        for one in made:
            one.setblocking(False)
            try:
                still += bool(one.recv(1))
            except BlockingIOError:
                still += 1
            except OSError:
                pass
            one.close()
        return f"{len(made)} opened, {still} still open after {lasting_s:g} s"

    return attack


def fill(url: str, name: str) -> str:
    """Send longer and longer prompts until the journal may not write one, then say how the server answers."""
    said: list[str] = []
    for number in range(20):
        status, text = post(
            url, {"model": name, "prompt": [5] * 4000 * (1 + number), "max_tokens": 1}, "/v1/completions"
        )
        if status != 200:
            said.append(f"{status} {text[21:150]}")
            break
    for path in ("/ready", "/health"):
        one = connection(url)
        one.request("GET", path)
        said.append(f"{path} {one.getresponse().status}")
        one.close()
    return "; ".join(said)


def damaged_journal() -> str:
    """Kill a server with four requests, flip a bit in the first one's record, start another; return the row."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--journal", folder)
        with ServerProcess(flags) as server:
            name = model(server.url)
            body = {"model": name, "prompt": [3, 4], "max_tokens": 3000, "ignore_eos": True, "stream": True}
            clients = [connection(server.url) for _ in range(4)]
            for number, client in enumerate(clients):
                client.request("POST", "/v1/completions", json.dumps(body), {"X-Request-Id": f"r{number}"})
                client.getresponse().readline()
            server.kill()
        file = min(Path(folder).glob("request-*"))
        data = bytearray(file.read_bytes())
        data[data.index(b"r0")] ^= 1
        file.write_bytes(data)
        with ServerProcess(flags) as server:
            found = []
            for number in range(4):
                one = connection(server.url)
                one.request("GET", f"/v1/requests/r{number}")
                found.append(one.getresponse().status in (200, 202))
                one.close()
        copies = len(list(Path(folder).glob("damaged-*")))
    what = f"{found.count(True)} of 4 were taken up; {copies} copy of the damaged file"
    return f"{'a flipped bit in one of 4 requests':40} {'':39}  {what}"


CLUSTER = """\
placement: ladder
pools:
  - {count: 1, role: prefill}
  - {count: 1, role: decode}
serve: {max_model_len: 64K, kv_cache_memory: 256M}
"""
CLUSTER_COMMAND = (*SERVE[:-1], "cluster")


@dataclass(frozen=True)
class ProcessFault:
    """A signal to the youngest process that computes, several times."""

    name: str
    signal: signal.Signals
    times: int = 3
    every_s: float = 8.0
    cluster: str = ""
    """The cluster file's text; empty: one engine."""


def leaves(pid: int) -> list[int]:
    """Return descendants without children of their own, oldest first: the processes that compute."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return sorted(leaf for child in children for leaf in leaves(child)) if children else [pid]


def memory_mb(pid: int) -> str:
    """Return resident and proportional (shared pages divided by their users) memory of each process below `pid`."""
    found = []
    for child in [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]:
        sizes = dict(line.split()[:2] for line in Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()[1:])
        found.append(f"{int(sizes['Rss:']) >> 10}/{int(sizes['Pss:']) >> 10}")
        found += [below for below in [memory_mb(child)] if below]
    return " + ".join(found)


def run_process_fault(fault: ProcessFault, flags: Sequence[str]) -> str:
    """Return the fault's row: `gap` is the longest after one of its signals, all are listed."""
    with contextlib.ExitStack() as stack:
        command, arguments = SERVE, list(flags)
        if fault.cluster:
            file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "cluster.yaml"
            file.write_text(fault.cluster)
            command, arguments = CLUSTER_COMMAND, [str(file), *flags]
        server = stack.enter_context(ServerProcess(arguments, command=command))
        pid = server.pid
        beside = stack.enter_context(Bystander(server.url, model(server.url)))
        time.sleep(1.0)
        began = time.monotonic()
        time.sleep(QUIET_S)
        middle, gaps, memory = time.monotonic(), [], memory_mb(pid)
        for _ in range(fault.times):
            since = time.monotonic()
            os.kill(leaves(pid)[-1], fault.signal)
            time.sleep(fault.every_s)
            gaps.append(beside.gap_ms(since - 0.5, time.monotonic()))
        end = time.monotonic()
    what = f"gaps {', '.join(f'{gap:.0f}' for gap in gaps)}; memory MB rss/pss {memory}"
    if beside.failures:
        what += f"; {len(beside.failures)} failures: {beside.failures[0]}"
    quiet, health = beside.gap_ms(began, middle), beside.health_ms(middle, end)
    return f"{fault.name:40} {quiet:7.0f} {max(gaps):7.0f} {health:7.0f} {end - middle:7.1f} {'':7}  {what}"


PROCESS_FAULTS = (
    ProcessFault("SIGKILL of the engine, 3 times", signal.SIGKILL),
    ProcessFault("SIGSTOP of the engine, 2 times", signal.SIGSTOP, times=2, every_s=16.0),
    ProcessFault("SIGKILL of the only decode instance", signal.SIGKILL, times=2, every_s=20.0, cluster=CLUSTER),
)

FAULTS = (
    Fault("4 prompts of 1 MB of English", prompts(*[english(MB)] * 4)),
    Fault("4 prompts of 1 MB of hex", prompts(*[os.urandom(MB // 2).hex() for _ in range(4)])),
    Fault("4 prompts of 1 MB of one letter", prompts(*["a" * MB] * 4)),
    Fault("a prompt of 60 MB of English", prompts(english(60 * MB))),
    Fault("600 idle connections, 256 files", connections(b""), limits="ulimit -n 256"),
    Fault(
        "600 half headers, 256 files",
        connections(b"GET /health HTTP/1.1\r\nHost: localhost\r\n"),
        limits="ulimit -n 256",
    ),
    Fault("the journal's disk is full", fill, ("--journal", f"{JOURNAL.name}/j"), limits="ulimit -f 128"),
    Fault("600 half bodies, 256 files", connections(HALF_BODY), limits="ulimit -n 256"),
)


def run(fault: Fault) -> str:
    """Return the fault's row."""
    command = ("sh", "-c", f'{fault.limits}; exec "$@"', "sh", *SERVE)
    with ServerProcess(fault.flags, command=command) as server:
        name = model(server.url)
        with Bystander(server.url, name) as beside:
            time.sleep(1.0)  # the first prefill, and imports at the first request
            began = time.monotonic()
            time.sleep(QUIET_S)
            middle = time.monotonic()
            what = fault.attack(server.url, name)
            end = time.monotonic()
        quiet, gap, health = beside.gap_ms(began, middle), beside.gap_ms(middle, end), beside.health_ms(middle, end)
        more = f"; {len(beside.failures)} failures beside: {beside.failures[0]}" if beside.failures else ""
        written = len(server.last_words())
        return f"{fault.name:40} {quiet:7.0f} {gap:7.0f} {health:7.0f} {end - middle:7.1f} {written:7}  {what}{more}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name has this")
    parser.add_argument("--serve", default="", help="flags of the servers whose processes are killed or stopped")
    parsed = parser.parse_args(arguments)
    only = parsed.only
    print(f"{'fault':40} {'quiet':>7} {'gap':>7} {'/health':>7} {'lasted':>7} {'log':>7}  what came of it")
    for fault in FAULTS:
        if only in fault.name:
            print(run(fault), flush=True)
    for process_fault in PROCESS_FAULTS:
        if only in process_fault.name:
            print(run_process_fault(process_fault, shlex.split(parsed.serve)), flush=True)
    if only in "a flipped bit in one of 4 requests":
        print(damaged_journal())


if __name__ == "__main__":
    main()
