"""Real instance processes over real sockets, and a script in the router's place."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
from tests.helpers.polling import let_arrive
from tests.helpers.process_tree import listener_pid

from headway.core.request import SamplingParams, SpanTask, Strategy
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.protocol import (
    HEARTBEAT_SUFFIX,
    AbortRequest,
    ComputeSpan,
    EngineInfo,
    EngineStats,
    FatalError,
    FromInstance,
    IterationOutputs,
    MeetPeers,
    OutputDelta,
    PeerAddress,
    SpanTaskDone,
    SpanTaskPaused,
    SubmitRequest,
)

WAIT_S = 20.0
TOKEN_BYTES = 3 * 2 * 2 * 8 * 4
"""KV of a token of the checkpoint."""
M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EngineInfo | IterationOutputs | FatalError | FromInstance)


def instance_main(endpoint: str, config: bytes) -> None:
    """A process that a fork server starts, which is quicker than a new interpreter."""
    from headway.runtime.assembly.engine_process import child_of, main

    os._exit(main(endpoint, child_of(os.getppid()), msgspec.json.decode(config, type=EngineConfig)))


class Instance:
    """One process. What it says is kept in `said` and `deltas` until a test asks."""

    def __init__(self, number: int, incarnation: int, folder: str, settings: dict[str, Any]) -> None:
        self.number, self.incarnation = number, incarnation
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._beats = self._context.socket(zmq.PULL)
        endpoint = f"ipc://{folder}/e{number}.{incarnation}"
        self._socket.bind(endpoint)
        self._beats.bind(endpoint + HEARTBEAT_SUFFIX)
        own = {"room_s": settings.get("room_s", 5.0)}
        config = EngineConfig(
            dtype="float32", threads=1, block_size=8, latency_profile="quick", worker_timeout_s=3.0,
            instance=InstanceConfig(
                number=number, incarnation=incarnation, listen=f"unix:{folder}/p{number}.{incarnation}", **own
            ),
            **{name: value for name, value in settings.items() if name != "room_s"},
        )  # fmt: skip
        alone = config.tensor_parallel_size == 1  # else it starts processes of its own
        self.process: BaseProcess = _server().Process(
            target=instance_main, args=(endpoint, msgspec.json.encode(config)), daemon=alone
        )
        self.process.start()
        self.said: list[Any] = []
        self.deltas: dict[str, list[OutputDelta]] = {}
        self.stats = EngineStats()
        self.held: dict[tuple[str, int], int] = {}
        """KV tokens that the snapshots before the end of each run have shown."""
        self.info: EngineInfo | None = None
        self.fatal: FatalError | None = None

    @property
    def peer(self) -> PeerAddress:
        assert self.info is not None
        assert self.info.peer_address is not None
        return PeerAddress(self.number, self.incarnation, self.info.peer_address, self.info.peer_others)

    def tell(self, message: msgspec.Struct, *frames: bytes) -> None:
        self._socket.send_multipart([_encoder.encode(message), *frames])

    def hear(self, wait_s: float = 0.0) -> None:
        """Take in what has come, waiting for the first for so long."""
        while self._socket.poll(int(1000 * wait_s)):
            wait_s = 0.0
            message = _decoder.decode(self._socket.recv())
            if isinstance(message, IterationOutputs):
                self.stats = message.stats or self.stats
                self.said += (delta for delta in message.deltas if delta.staged is not None)
                for delta in message.deltas:
                    if delta.staged is None:
                        self.deltas.setdefault(delta.id, []).append(delta)
            elif isinstance(message, EngineInfo):
                self.info = message
            elif isinstance(message, FatalError):
                self.fatal = message
            else:
                self.said.append(message)
                if isinstance(message, SpanTaskDone):
                    self.held[message.id, message.index] = self.stats.kv_tokens_used

    def beats(self) -> int:
        """How many have come since the last time."""
        count = 0
        with suppress(zmq.Again):
            while True:
                self._beats.recv(zmq.NOBLOCK)
                count += 1
        return count

    def wait(self, kind: type[M], name: str, wait_s: float = WAIT_S) -> M:
        """The next message of a kind about a request."""
        return self.until(lambda: self.take(kind, name), wait_s)

    def until(self, look: Callable[[], M | None], wait_s: float = WAIT_S) -> M:
        end = time.monotonic() + wait_s
        while (found := look()) is None:
            assert self.fatal is None, self.fatal
            assert time.monotonic() < end, f"instance {self.number} has said {self.said}, {self.deltas}"
            self.hear(0.05)
        return found

    def take(self, kind: type[M], name: str) -> M | None:
        """A message of a kind about a request, if it was heard."""
        for message in self.said:
            if isinstance(message, kind) and message.id == name:  # type: ignore[attr-defined]
                self.said.remove(message)
                return message
        return None

    def answer(self, name: str) -> list[OutputDelta]:
        """All deltas of a request, once the last has come."""
        return self.until(lambda: d if (d := self.deltas.get(name)) and d[-1].finish is not None else None)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT_S)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What it is told within comes to it together."""
        self.signal(signal.SIGSTOP)
        yield
        let_arrive()
        self.signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process.is_alive():
            self.kill()
        self._socket.close(0)
        self._beats.close(0)
        self._context.term()


@dataclass
class Part:
    """A run of `tokens` on a group."""

    tokens: int
    group: tuple[int, ...]
    attn: str = "ring"
    mlp: str = "local"
    node: int | None = None
    in_place: bool = False
    rows: int = 0
    keepers: tuple[int, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


def runs(parts: Sequence[Part]) -> list[SpanTask]:
    found, at = [], 0
    for part in parts:
        strategy = Strategy(attn=part.attn, mlp=part.mlp)
        found.append(
            SpanTask(at, at + part.tokens, part.group, strategy, part.node, part.in_place, part.rows, part.keepers)
        )
        at += part.tokens
    return found


def frame(prompt: Sequence[int]) -> bytes:
    return array("i", prompt).tobytes()


class World:
    """Some instances of one model, which have met. `own`: settings of each that not all have."""

    def __init__(self, model: Path, count: int, own: Sequence[dict[str, Any]] = (), **settings: Any) -> None:
        self._folder = tempfile.mkdtemp(prefix="hw-")
        each = own or [{}] * count
        self._settings = [{"model": str(model), **settings, **each[n]} for n in range(count)]
        self._lives = [0] * count
        self.instances = [Instance(n, 0, self._folder, self._settings[n]) for n in range(count)]
        try:
            for instance in self.instances:
                self._ready(instance)
        except BaseException:
            self.close()  # else its sockets are found open in another test
            raise
        self.meet()

    def _ready(self, instance: Instance) -> None:
        instance.until(lambda: instance.info, 60.0)

    def __getitem__(self, number: int) -> Instance:
        return self.instances[number]

    def rank_pids(self, number: int) -> list[int]:
        """Processes of an instance's ranks: those that listen for other instances, rank 0 first."""
        peer = self[number].peer
        return [listener_pid(address.removeprefix("unix:")) for address in (peer.address, *peer.others)]

    def meet(self, without: Sequence[int] = ()) -> None:
        there = [one for one in self.instances if one.number not in without]
        for one in there:
            one.tell(MeetPeers(tuple(other.peer for other in there)))

    def again(self, number: int) -> None:
        """Another process takes the number of one that has ended."""
        self.instances[number].close()
        self._lives[number] += 1
        self.instances[number] = Instance(number, self._lives[number], self._folder, self._settings[number])
        self._ready(self.instances[number])
        self.meet()

    def admit(
        self,
        name: str,
        prompt: Sequence[int],
        on: Sequence[int],
        params: SamplingParams,
        output: tuple[int, ...] = (),
        **fields: Any,
    ) -> None:
        fields = {"prefix_cache": False, **fields}
        admit = SubmitRequest(id=name, prompt_tokens=len(prompt), params=params, output=output, phase="spans", **fields)
        for number in on:
            self[number].tell(admit, frame(prompt))

    def compute(self, name: str, parts: Sequence[Part], index: int, **fields: Any) -> None:
        all_ = runs(parts)
        one = ComputeSpan(
            id=name, index=index, run=all_[index], before=tuple(all_[:index]), last=index == len(parts) - 1, **fields
        )
        for number in all_[index].group:
            self[number].tell(one)

    def done(self, name: str, part: Part) -> SpanTaskDone:
        """The first one's word, when all have said it."""
        first, *_ = [self[number].wait(SpanTaskDone, name) for number in part.group]
        return first

    def paused(self, name: str, part: Part) -> list[SpanTaskPaused]:
        return [self[number].wait(SpanTaskPaused, name) for number in part.group]

    def prefill(self, name: str, prompt: Sequence[int], parts: Sequence[Part], **params: Any) -> OutputDelta:
        """All runs of a prompt; what the first instance says at the end."""
        everybody = sorted({number for part in parts for number in part.group})
        self.admit(name, prompt, everybody, SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params}))
        for index, part in enumerate(parts):
            self.compute(name, parts, index, **part.fields)
            word = self.done(name, part)
            assert (word.delta is not None) == (index == len(parts) - 1)
        assert word.delta is not None
        return word.delta

    def decode(self, name: str, prompt: Sequence[int], first: OutputDelta, on: int, **params: Any) -> list[OutputDelta]:
        """The rest of an answer whose KV is all on one instance."""
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
        self[on].tell(
            SubmitRequest(
                id=name, prompt_tokens=len(prompt), params=sampling, received_s=time.monotonic(), phase="decode",
                output=first.tokens,
            ),
            frame(prompt),
        )  # fmt: skip
        return self[on].answer(name)

    def ask(self, on: int, name: str, prompt: Sequence[int], **params: Any) -> None:
        """Give a request to the scheduler of one instance."""
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
        self[on].tell(
            SubmitRequest(id=name, prompt_tokens=len(prompt), params=sampling, received_s=time.monotonic()),
            frame(prompt),
        )

    def forget(self, name: str) -> None:
        for instance in self.instances:
            if instance.process.is_alive():
                instance.tell(AbortRequest(name))

    def clean(self, but: Sequence[int] = ()) -> None:
        """Nothing of any request is left anywhere: pools are empty."""
        for one in self.instances:
            if one.number not in but:
                one.until(lambda one=one: one.stats.kv_tokens_used == 0 or None, 5.0)

    def clear(self) -> None:
        """Forget what instances have said; nothing is left of any request."""
        for one in self.instances:
            one.said.clear()
        self.clean()

    def recover(self) -> None:
        """Start all instances again if something of a request is left."""
        try:
            self.clear()
        except AssertionError:
            for number in range(len(self.instances)):
                self.again(number)

    def close(self) -> None:
        for instance in self.instances:
            instance.close()
        with suppress(OSError):
            for path in Path(self._folder).iterdir():
                path.unlink()
            Path(self._folder).rmdir()


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "headway.runtime.assembly.engine_process",
            "headway.runtime.assembly.single_process",
            "headway.runtime.assembly.instance",
            "headway.runtime.sequence_parallel.spans",
        ]
    )
    return context
