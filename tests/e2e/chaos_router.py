"""`headway cluster` with links between its instances that can be hurt: each socket runs through here.

usage: python -m tests.e2e.chaos_router CONTROL cluster.yaml ...

At the socket CONTROL: one line of JSON a connection, `{"cut": [[pids], [pids]]}` or `{"slow": seconds}`, and one as
answer.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import cast

import msgspec

from headway.cli.main import main
from headway.runtime.cluster.instances import LiveInstance
from headway.runtime.engine.protocol import PeerAddress

_MOST = 1 << 16


class Links:
    """In the router's process. Who connects is told by the process at the other end of its socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._vias: dict[str, str] = {}
        self._up: list[_Link] = []
        self._delay_s = 0.0

    def via(self, address: str) -> str:
        """Where an instance that listens at an address (`unix:PATH`) is found instead."""
        with self._lock:
            if address not in self._vias:
                path = address.removeprefix("unix:")
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                listener.bind(path + ".via")
                listener.listen(64)
                self._vias[address] = f"unix:{path}.via"
                threading.Thread(target=self._accept, args=(listener, path), daemon=True).start()
            return self._vias[address]

    def cut(self, ends: tuple[list[int], list[int]]) -> int:
        """End what is between processes of one instance and those of another; how many sockets that were."""
        pairs = {frozenset(pair) for pair in product(*ends)}
        with self._lock:
            hit = [link for link in self._up if not link.over and frozenset(link.pids) in pairs]
        for link in hit:
            link.end()
        return len(hit)

    def slow(self, delay_s: float) -> None:
        """From now on whatever is read waits so long, everywhere."""
        self._delay_s = delay_s

    def _accept(self, listener: socket.socket, path: str) -> None:
        while True:
            here, _ = listener.accept()
            there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                there.connect(path)
            except OSError:
                here.close()
                there.close()
                continue
            link = _Link(here, there)
            with self._lock:
                self._up = [one for one in self._up if not one.over] + [link]
            for source, target in ((here, there), (there, here)):
                threading.Thread(target=self._pump, args=(link, source, target), daemon=True).start()

    def _pump(self, link: _Link, source: socket.socket, target: socket.socket) -> None:
        room = memoryview(bytearray(_MOST))
        with suppress(OSError):
            while count := source.recv_into(room):
                if self._delay_s:
                    time.sleep(self._delay_s)
                target.sendall(room[:count])
        link.end()


class _Link:
    """One connection. `pids`: of its ends."""

    def __init__(self, here: socket.socket, there: socket.socket) -> None:
        self._ends = here, there
        self.pids = _pid(here), _pid(there)
        self.over = False

    def end(self) -> None:
        self.over = True
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _pid(end: socket.socket) -> int:
    """Of the process at the other end."""
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)


def processes(folder: Path) -> list[int]:
    """Processes whose command line names a folder (that of a cluster's sockets), zombies aside."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal() and int(each.name) != os.getpid():
            with suppress(OSError):
                if str(folder).encode() in (each / "cmdline").read_bytes():
                    found.append(int(each.name))
    return found


def serve(control: Path, links: Links) -> None:
    """Do what is asked for at `control`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(control))
    listener.listen()
    while True:
        asker, _ = listener.accept()
        with asker, asker.makefile("rw") as lines:
            asked = json.loads(lines.readline())
            if "cut" in asked:
                answer = links.cut(tuple(asked["cut"]))
            else:
                links.slow(asked["slow"])
                answer = 0
            lines.write(json.dumps(answer) + "\n")


def through(links: Links) -> None:
    """Instances find each other through links."""
    direct = cast(property, LiveInstance.__dict__["peer"])

    def peer(self: LiveInstance) -> PeerAddress | None:
        found: PeerAddress | None = direct.fget(self) if direct.fget is not None else None
        if found is None:
            return None
        others = tuple(links.via(each) for each in found.others)
        return msgspec.structs.replace(found, address=links.via(found.address), others=others)

    LiveInstance.peer = property(peer)  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    control, *arguments = sys.argv[1:]
    links = Links()
    through(links)
    threading.Thread(target=serve, args=(Path(control), links), daemon=True).start()
    raise SystemExit(main(["cluster", *arguments]))
