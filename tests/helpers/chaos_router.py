"""`headway cluster` with links between its instances that can be hurt.

usage: python -m tests.helpers.chaos_router CONTROL cluster.yaml ...

At the socket CONTROL: one line of JSON a connection, `{"cut": [[pids], [pids]]}` or `{"slow": seconds}`, and one as
answer.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path
from typing import cast

import msgspec
from tests.helpers.chaos_links import Links

from headway.cli.main import main
from headway.runtime.cluster.instances import LiveInstance
from headway.runtime.engine.protocol import PeerAddress


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
