"""Ranks as processes of this host: started by forkserver with torch preloaded, spoken to over ZeroMQ. No torch here.

The forkserver imports once and each rank is a fork of it, so that ten ranks start nearly as quickly as one.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

import msgspec
import zmq

from headway import __version__
from headway.core.errors import ConfigError
from headway.parallel.messages import PROTOCOL, Failed, FromRank, Hello, Ready, Stop, Welcome
from headway.parallel.rank_config import RankConfig
from headway.parallel.wire import Frame, RankLostError

M = TypeVar("M", Hello, Ready)

_PROCESS = "headway.worker.process"
_GRACE_S = 3.0

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class ProcessWire:
    """`Wire` to the ranks of `config.layout`, started at construction and ready after `start`."""

    def __init__(self, config: RankConfig) -> None:
        self._directory = tempfile.mkdtemp(prefix="headway-ranks-")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        endpoint = f"ipc://{self._directory}/ranks"
        self._socket.bind(endpoint)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PROCESS])
        settings = msgspec.json.encode(config)
        self.processes: list[ForkServerProcess] = []
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        for rank in range(config.layout.accelerators):
            process = context.Process(target=_run, args=(rank, endpoint, settings), name=f"headway-rank-{rank}")
            process.start()
            self.processes.append(process)
            self._poller.register(process.sentinel, zmq.POLLIN)

    @property
    def waits_on(self) -> tuple[Any, ...]:
        """See `Wire.waits_on`."""
        return (self._socket, *(process.sentinel for process in self.processes))

    def start(self) -> list[Ready]:
        """Wait until all ranks have met and loaded; what each has, by rank. ConfigError with a rank's own words."""
        try:
            hellos = self._gather(Hello)
            for rank, hello in enumerate(hellos):
                if (hello.protocol, hello.version) != (PROTOCOL, __version__):
                    raise ConfigError(
                        f"worker {rank} is of version {hello.version} (protocol {hello.protocol}), the engine of "
                        f"{__version__} (protocol {PROTOCOL})"
                    )
            for rank in range(len(hellos)):
                self.send(rank, (_encoder.encode(Welcome(hellos[0].store_port)),))
            ready = self._gather(Ready)
            if len({one.mark for one in ready}) > 1:
                raise ConfigError("the workers have loaded different checkpoints: " + ", ".join(r.mark for r in ready))
            return ready
        except RankLostError as error:
            self.close()
            raise ConfigError(
                f"{error} while starting (its log says more; out of memory ends with signal 9)"
            ) from error
        except BaseException:
            self.close()
            raise

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        """See `Wire.send`."""
        try:
            self._socket.send_multipart([b"%d" % rank, *frames], copy=False)
        except zmq.ZMQError as error:
            self.processes[rank].join(1.0)  # its connection ends a moment before it does
            self._check_alive()
            raise RankLostError(rank, f"cannot be reached ({error})") from error

    def receive(self, timeout_s: float | None) -> tuple[int, list[bytes]] | None:
        """See `Wire.receive`. What a rank said before it ended comes first."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                return int(name), frames
            except zmq.Again:
                pass
            left_ms = None if until is None else max(0, round((until - time.monotonic()) * 1000.0))
            ready = dict(self._poller.poll(left_ms))
            if self._socket not in ready:
                self._check_alive()
                if until is not None and time.monotonic() >= until:
                    return None

    def close(self) -> None:
        """See `Wire.close`."""
        for rank, process in enumerate(self.processes):
            if process.is_alive():
                try:
                    self._socket.send_multipart([b"%d" % rank, _encoder.encode(Stop())])
                except zmq.ZMQError:
                    process.kill()
        until = time.monotonic() + _GRACE_S
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._socket.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _check_alive(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.exitcode is not None:
                raise RankLostError(rank, f"has ended with {_words(process.exitcode)}")

    def _gather(self, kind: type[M]) -> list[M]:
        """One message of that kind from every rank, by rank."""
        told: dict[int, M] = {}
        while len(told) < len(self.processes):
            message = self.receive(None)
            assert message is not None
            rank, frames = message
            said = _decoder.decode(frames[0])
            if isinstance(said, Failed):
                raise ConfigError(said.error if said.ours else f"worker {rank} failed while starting: {said.error}")
            if not isinstance(said, kind):
                raise ConfigError(f"worker {rank} says {said!r} while starting")
            told[rank] = said
        return [told[rank] for rank in sorted(told)]


def _run(rank: int, endpoint: str, settings: bytes) -> None:
    """In the rank's process."""
    main: Callable[[int, str, bytes], None] = import_module(_PROCESS).main
    main(rank, endpoint, settings)


def _words(code: int) -> str:
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
