"""The connector over NIXL (UCX on this host): ends that go are told of. What all connectors do: `test_peer_connector`.

Only where NIXL is installed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.polling import let_arrive
from tests.transfer.kv_ends import LAYERS, SLOTS, End, meet

from headway.runtime.engine.protocol import PeerAddress
from headway.runtime.kv_transfer.connector import SaveKv

pytest.importorskip("nixl", reason="NIXL is not installed (pip install 'headway[nixl]')")

WIDE = 1 << 13
Make = Callable[..., list[End]]

SENDS = """
import sys, threading, numpy as np
from pathlib import Path
from tests.transfer.kv_ends import LAYERS, SLOTS, End
from headway.runtime.kv_transfer.connector import SaveKv
from headway.runtime.engine.protocol import PeerAddress
folder = Path(sys.argv[1])
end = End(1, folder, connector="nixl")
end.cache = np.full((LAYERS, 2, 2, SLOTS, 8192), 7, dtype=np.uint8)
end.peers.meet([PeerAddress(n, 0, f"unix:{folder}/{n}") for n in (0, 1)])
positions = np.arange(SLOTS)
end.save(SaveKv("a", 1, 0), end.part(positions, positions))
end.connector.save_kv_layer(SaveKv("b", 2, 0), 0, end.part(positions, positions))
print("up", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[End] = []

    def make(count: int) -> list[End]:
        for number in range(count):
            end = End(number, tmp_path, connector="nixl")
            end.cache = np.random.default_rng(number).integers(0, 255, (LAYERS, 2, 2, SLOTS, WIDE), dtype=np.uint8)
            made.append(end)
        meet(*made)
        return made

    yield make
    for end in made:
        end.close()


def test_a_killed_sender_is_reported_and_its_next_incarnation_is_read(tmp_path: Path) -> None:
    end = End(0, tmp_path, connector="nixl")
    end.cache = np.zeros((LAYERS, 2, 2, SLOTS, WIDE), dtype=np.uint8)
    for life in range(2):
        for name in "ab":
            end.open(name, SLOTS, ((0, SLOTS),))
        (tmp_path / "1").unlink(missing_ok=True)
        child = subprocess.Popen(
            [sys.executable, "-c", SENDS, str(tmp_path)],
            stdout=subprocess.DEVNULL,
        )
        try:
            end.peers.meet([PeerAddress(0, 0, f"unix:{tmp_path}/0"), PeerAddress(1, 0, f"unix:{tmp_path}/1")])
            end.until(lambda life=life: len(end.received) == life + 1, 60.0)
            assert np.all(end.cache == 7)
            end.until(lambda: end.connector.get_num_new_matched_tokens("b") == SLOTS // LAYERS)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
        end.until(lambda life=life: len(end.lost) == life + 1)
        assert end.lost[-1].id == "b"
        for name in "ab":
            end.connector.forget(name)
        end.cache[:] = 0
        let_arrive(0.05)
    end.close()


def test_waits_on_an_end_that_never_answers_fail(tmp_path: Path) -> None:
    end = End(1, tmp_path, connector="nixl")
    end.cache = np.zeros((LAYERS, 2, 2, SLOTS, WIDE), dtype=np.uint8)
    end.peers.meet([PeerAddress(0, 0, f"unix:{tmp_path}/0"), PeerAddress(1, 0, f"unix:{tmp_path}/1")])
    positions = np.arange(SLOTS)
    for piece in range(4):  # more than the memory that others may read
        end.save(SaveKv(f"a{piece}", piece, 0), end.part(positions, positions))
    end.until(lambda: len(end.lost) == 4)
    end.close()


def test_an_endless_read_is_given_up_with_its_connection(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = make(2)
    agent = receiver.connector._kinds[0]._agent  # type: ignore[attr-defined]
    looked: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(agent, "transfer", lambda handle: "PROC")
        patched.setattr(agent, "check_xfer_state", lambda handle: looked.append(handle) or "PROC")
        receiver.open("a", SLOTS, ((0, SLOTS),))
        positions = np.arange(SLOTS)
        sender.save(SaveKv("a", 1, 1), sender.part(positions, positions))
        receiver.until(lambda: bool(looked))
        for connection in list(sender.peers._connections.values()):
            connection.end("it was cut")
        receiver.until(lambda: bool(receiver.lost))
    for end in (sender, receiver):
        end.connector.forget("a")
        end.peers.forget("a")
    receiver.open("b", SLOTS, ((0, SLOTS),))
    sender.save(SaveKv("b", 2, 1), sender.part(positions, positions))
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache, sender.cache)
