"""Entry point of a rank's process: joins the other ranks, loads its share of the model, serves.

Started by `runtime.executor.multi_process`, on another host by `runtime.launcher.ray_hosts`, never by hand.

usage there: python -m headway.runtime.executor.rank_process ENDPOINT PARENT_PID RANK < config.json
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
from torch._C._distributed_c10d import Store

from headway.core.errors import ConfigError, HeadwayError
from headway.core.files import read_json
from headway.core.logs import setup
from headway.runtime.attention.backends import make_backend
from headway.runtime.engine.liveness import PER_TIMEOUT, HeartbeatSender
from headway.runtime.engine.protocol import EndProcess, FatalError
from headway.runtime.executor.plans import (
    CONTROL_IDENTITY,
    HEARTBEAT_IDENTITY,
    FromRank,
    LoadedRank,
    RankConfig,
    RankHello,
    RankWelcome,
    ToRank,
    place_of,
)
from headway.runtime.executor.rank import (
    GlooLinks,
    RankKvTransfer,
    RankLoop,
    choose_interface,
    failure,
    join,
    local_rendezvous,
    rendezvous,
)
from headway.runtime.executor.worker import GroupAttention, ModelWorker
from headway.runtime.launcher.processes import guard_client
from headway.runtime.model.config import read_config
from headway.runtime.model.loading import load_decoder, resolve_dtype

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)

_LOCAL = "ipc://"
"""Beginning of the engine's endpoint where all ranks are on its host."""
_PR_SET_PDEATHSIG = 1
_PARENT_S = 0.5
"""Interval between two looks for the parent of a rank on another host."""


class ZmqChannel:
    """A rank's end: a DEALER socket whose identity is the rank's number. `token`: see `RankConfig`."""

    def __init__(self, rank: int, endpoint: str, token: str | None) -> None:
        self._context = zmq.Context()
        self._endpoint, self._token = endpoint, token
        self._socket = self._connected(b"%d" % rank)
        self._heart: HeartbeatSender | None = None
        self._control: zmq.Socket[Any] | None = None
        self._control_gate = threading.Lock()
        self._closed = False

    def live(self, rank: int, every_s: float) -> None:
        """Start to send heartbeats over a separate connection."""
        self._heart = HeartbeatSender(lambda: self._connected(HEARTBEAT_IDENTITY + b"%d" % rank), bytes, every_s)

    def _connected(self, name: bytes) -> zmq.Socket[Any]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, name)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if self._token is not None:
            guard_client(socket, self._token)
        socket.connect(self._endpoint)
        return socket

    def control_sender(self, rank: int) -> Callable[[bytes], None]:
        """Return a function that sends frames over a separate connection, from any thread.

        It drops frames once the channel is closed.
        """

        def send(frame: bytes) -> None:
            # ZeroMQ sockets are not thread-safe; the lock also orders a send against `close`.
            with self._control_gate:
                if self._closed:
                    return
                if self._control is None:
                    self._control = self._connected(CONTROL_IDENTITY + b"%d" % rank)
                self._control.send(frame)

        return send

    def receive(self, wait: bool) -> list[memoryview] | None:
        """Return the next message's frames; None when there is none and `wait` is false."""
        try:
            frames = self._socket.recv_multipart(0 if wait else zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return [memoryview(frame.buffer) for frame in frames]

    def send(self, frame: bytes) -> None:
        """Send one frame to the engine. Never blocks."""
        self._socket.send(frame)

    def close(self) -> None:
        """Close all connections after sending what is queued (for at most 1 s each)."""
        if self._heart is not None:
            self._heart.stop()
        with self._control_gate:
            self._closed = True
            if self._control is not None:
                self._control.close()
        self._socket.close()
        self._context.term()


def main(rank: int, endpoint: str, settings: bytes, parent: int | None = None) -> None:
    """Serve until `EndProcess`, or until the parent's process has ended. Never returns.

    parent: process id of what has started this process on another host than the engine's.
    """
    _end_with_the_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    config = msgspec.json.decode(settings, type=RankConfig)
    engine = config.engine
    owner = {} if engine.instance is None else {"instance": engine.instance.number}
    setup(engine.log_level, engine.log_format, **owner, worker=rank)
    torch.set_num_threads(engine.threads or 1)
    channel = ZmqChannel(rank, endpoint, config.token)
    channel.live(rank, config.timeout_s / PER_TIMEOUT)
    code = 0
    try:
        _serve(rank, config, channel, endpoint)
    except HeadwayError as error:
        channel.send(_encoder.encode(FatalError(str(error))))
        code = 1
    except BaseException as error:
        logging.getLogger("headway.worker").exception("worker %d cannot go on", rank)
        channel.send(_encoder.encode(failure(error)))
        code = 1
    channel.close()
    # Not an orderly exit: torch.distributed's teardown would wait for ranks that may be gone.
    os._exit(code)


def _serve(rank: int, config: RankConfig, channel: ZmqChannel, endpoint: str) -> None:
    engine, layout = config.engine, config.engine.layout
    place = place_of(layout, rank)
    store: Store | None = None
    port = 0
    if endpoint.startswith(_LOCAL):
        # Beside the engine's socket, in the folder that was made for these ranks.
        store = local_rendezvous(Path(endpoint.removeprefix(_LOCAL)).parent, config.patience_s)
    elif rank == 0:
        # Rank 0 creates the store before it reports the port; the others join after the welcome, which carries it.
        store = made = rendezvous(config.host, None, config.patience_s)
        port = made.port
    _send(channel, RankHello(store_port=port))
    frames = channel.receive(wait=True)
    assert frames is not None
    welcome = _decoder.decode(frames[0])
    if isinstance(welcome, EndProcess):
        return
    assert isinstance(welcome, RankWelcome), f"the engine's first word is {welcome!r}"
    store = store or rendezvous(config.host, welcome.store_port, config.patience_s)
    choose_interface(config.host)
    join(rank, layout.accelerators, store, config.patience_s)
    path = Path(engine.model) / "config.json"
    shape = read_config(read_json(path), engine.max_model_len, str(path))
    device = torch.device(config.device(rank))
    # Checked before the model is loaded, and in the rank: the engine does not import torch.
    if device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"worker {rank} shall compute on {device}, and this host has {torch.cuda.device_count()}")
        torch.cuda.set_device(device)
    links = GlooLinks(place, shape.hidden_size, resolve_dtype(engine.dtype, shape), device)
    backend = make_backend(engine.attention_backend)
    group = links if layout.tp > 1 else None
    decoder = load_decoder(engine.model, engine.dtype, engine.max_model_len, str(device), backend, place.shard, group)
    if layout.kvp > 1:
        decoder.backend = GroupAttention(decoder.backend, links, decoder.config.q_heads)
    worker = ModelWorker(decoder, config.kv_blocks, engine.block_size, config.eos, links)
    held = decoder.weights.parameters * decoder.dtype.itemsize
    dtype = str(decoder.dtype).removeprefix("torch.")
    kv = None
    # KV moves between host memories only.
    if config.peer is not None and device.type == "cpu":
        send_control = channel.control_sender(rank)
        kv = RankKvTransfer(
            worker,
            shape,
            config.eos,
            engine.block_size,
            config.peer,
            lambda message: _send(channel, message),
            lambda message: send_control(_encoder.encode(message)),
        )
    address = None if kv is None else kv.address
    loaded = LoadedRank(decoder.fingerprint, dtype, torch.get_num_threads(), held, worker.pool.nbytes, address)
    _send(channel, RankHello(loaded=loaded))
    RankLoop(worker, channel, kv).serve()
    links.close()


def _send(channel: ZmqChannel, message: FromRank) -> None:
    channel.send(_encoder.encode(message))


def _end_with_the_parent(parent_pid: int | None) -> None:
    """Have this process end with the engine, or on another host with what has started it there, in two ways.

    The sentinel of a fork is a pipe that the engine holds open for as long as it lives: a thread watches it. The
    parent, the engine's forkserver, ends with the engine; the kernel then kills even a rank that is stopped.
    """
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            wait_for([parent.sentinel])
        else:
            # An orphan gets another parent.
            while parent_pid is not None and os.getppid() == parent_pid:
                time.sleep(_PARENT_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[3]), sys.argv[1], sys.stdin.buffer.read(), int(sys.argv[2]))
