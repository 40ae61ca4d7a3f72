"""How a rank's process lets go of its connections to the engine."""

from __future__ import annotations

import threading
from pathlib import Path

import zmq

from headway.runtime.executor.plans import CONTROL_IDENTITY
from headway.runtime.executor.rank_process import ZmqChannel


def test_a_channel_closes_after_a_thread_has_sent_a_control_message(tmp_path: Path) -> None:
    """That thread may live on: what it says then goes nowhere."""
    context = zmq.Context()
    engine = context.socket(zmq.ROUTER)
    engine.bind(f"ipc://{tmp_path}/e")
    channel = ZmqChannel(3, f"ipc://{tmp_path}/e", None)
    aside = channel.control_sender(3)
    speaks = threading.Thread(target=aside, args=(b"came",))
    speaks.start()
    speaks.join()
    channel.send(b"failed")
    ends = threading.Thread(target=channel.close, daemon=True)
    ends.start()
    ends.join(5.0)
    assert not ends.is_alive()
    aside(b"too late")
    said: set[tuple[bytes, bytes]] = set()
    while engine.poll(1000 if len(said) < 2 else 0):
        name, frame = engine.recv_multipart()
        said.add((name, frame))
    assert said == {(b"3", b"failed"), (CONTROL_IDENTITY + b"3", b"came")}
    context.destroy(linger=0)
