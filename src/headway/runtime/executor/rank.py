"""A rank's side: its message loop, its links to other ranks, its end of KV transfers, and its part in span tasks.

Receives for queued plans are posted early.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from typing_extensions import override

from headway.core.batch import GroupBatch
from headway.core.errors import HeadwayError, InvariantError
from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.config import InstanceConfig
from headway.runtime.engine.protocol import (
    AbortRequest,
    ComputeSpan,
    EndProcess,
    FatalError,
    KvArrived,
    MeetPeers,
    PauseRequest,
    PeerLostError,
    ReserveKv,
    ResumeSpan,
    SendKv,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
    SubmitRequest,
    end_of,
    heads_of,
    instance_of,
)
from headway.runtime.executor.measure import measure
from headway.runtime.executor.plans import (
    BatchPlan,
    FromRank,
    InstanceFromRank,
    InstanceToRank,
    MeasuredSeconds,
    MeasureRank,
    PlanDone,
    PlanReader,
    RankPosition,
    SpanFromRank,
    SpanToRank,
    ToRank,
    places,
)
from headway.runtime.executor.worker import ModelWorker, RankLinks
from headway.runtime.kv_transfer.connector import SaveKv, make_connector
from headway.runtime.kv_transfer.peers import PeerNetwork
from headway.runtime.kv_transfer.port import KvPort
from headway.runtime.launcher.processes import address_towards, interface_of
from headway.runtime.model.config import DecoderConfig
from headway.runtime.sequence_parallel.spans import SpanExecutor

if TYPE_CHECKING:
    from headway.runtime.executor.rank_process import ZmqChannel

# Links over torch.distributed: ranks of one host or of several, on CPU or on CUDA devices.
#
# Messages from one rank to another go over gloo, from host memory to host memory. On CUDA devices, NCCL carries only
# the sums of ranks that share layers: it would delay a message sent behind one that is still waited for, which the
# early posting of receives relies on not happening.

_ROWS, _TOKENS, _LOGITS, _PEERS = 1, 2, 3, 4
"""Tags, so that messages of one kind never meet those of another."""


class GlooLinks(RankLinks):
    """`RankLinks` over the default process group; made after `join`.

    hidden, dtype: width and type of the rows that stages pass on. device: the device of this rank.
    """

    def __init__(
        self,
        place: RankPosition,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._place = place
        self._device = device
        self._hidden, self._dtype = hidden, dtype
        stages = place.layout.stages
        self._before = place.at_stage(place.stage - 1).rank if place.stage else None
        self._behind = place.at_stage(place.stage + 1).rank if place.stage + 1 < stages else None
        self._group = _tensor_groups(place, "nccl" if device.type == "cuda" else "gloo")
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._answered: deque[tuple[Any, Tensor]] = deque()
        # At most `stages` batches are in flight, each with at most tp + 2 messages: rows, logits, tokens to tp readers.
        self._most = (stages + 1) * (place.layout.tp + 2)

    @override
    def sum_(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    @override
    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        ranks = self._place.stage_ranks
        if self._place.tp:
            self._send(x.contiguous(), ranks[0], _LOGITS)
            return None
        x = x.cpu()
        parts = [x, *(x.new_empty(x.shape[0], width) for width in widths[1:])]
        # All receives are posted before the first is waited for.
        for work in [_asked(part, rank, _LOGITS) for part, rank in zip(parts[1:], ranks[1:], strict=True)]:
            work.wait()
        return torch.cat(parts, dim=1)

    @override
    def expect_rows(self, rows: int) -> Callable[[], Tensor]:
        assert self._before is not None, "no stage is before the first one"
        hidden = torch.empty(rows, self._hidden, dtype=self._dtype)
        work = _asked(hidden, self._before, _ROWS)

        def wait() -> Tensor:
            work.wait()
            return hidden.to(self._device)

        return wait

    @override
    def send_rows(self, hidden: Tensor) -> None:
        assert self._behind is not None, "no stage is behind the last one"
        self._send(hidden, self._behind, _ROWS)

    @override
    def expect_tokens(self, count: int) -> Callable[[], list[int]]:
        drawn = torch.empty(count, dtype=torch.int64)
        work = _asked(drawn, self._place.drawer.rank, _TOKENS)

        def wait() -> list[int]:
            work.wait()
            tokens: list[int] = drawn.tolist()
            return tokens

        return wait

    @override
    def send_tokens(self, tokens: list[int]) -> None:
        drawn = torch.tensor(tokens, dtype=torch.int64)
        for reader in self._place.readers:
            self._send(drawn, reader.rank, _TOKENS)

    @override
    def expect_from(self, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        x = torch.empty(shape, dtype=dtype)
        work = _asked(x, self._place.in_group(group).rank, _PEERS)

        def wait() -> Tensor:
            work.wait()
            return x.to(self._device)

        return wait

    @override
    def send_to(self, group: int, x: Tensor) -> None:
        """A send is waited for only when its buffer count exceeds two layers of all peers.

        By then its answer, or the queries that follow it, have been received, so the wait returns at once.
        """
        x = x.cpu()
        work = dist.isend(x, self._place.in_group(group).rank, tag=_PEERS)
        assert work is not None
        self._answered.append((work, x))
        while len(self._answered) > 4 * self._place.layout.kvp:
            done, _ = self._answered.popleft()
            done.wait()

    def close(self) -> None:
        """Release buffers. Connections end with the process: an orderly exit would wait for ranks that may be gone."""
        self._sent.clear()
        self._answered.clear()

    def _send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Begin to send. Old sends are only waited for when so many have followed that they are long complete."""
        tensor = tensor.cpu()
        work = dist.isend(tensor, rank, tag=tag)
        assert work is not None
        self._sent.append((work, tensor))
        while len(self._sent) > self._most:
            done, _ = self._sent.popleft()
            done.wait()


def join(rank: int, world: int, store: Store, timeout_s: float) -> None:
    """Become rank `rank` of `world`. Called once a process, by all of them."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))


def local_rendezvous(folder: Path, timeout_s: float) -> FileStore:
    """Return the rendezvous store of ranks that are all on this host: a file in `folder`, which is this user's only.

    A store on a port of loopback would answer any user of the host.
    """
    store = FileStore(str(folder / "rendezvous"))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def rendezvous(host: str, port: int | None, timeout_s: float) -> TCPStore:
    """Return the rendezvous store of the ranks at (host, port). port None: create it, on a free port of `host`."""
    timeout = timedelta(seconds=timeout_s)
    if port is not None:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    # torch's own listening socket would accept on all interfaces.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def choose_interface(host: str) -> None:
    """Have gloo use the network interface through which `host` is reached, unless GLOO_SOCKET_IFNAME names another.

    Called before `join`. By default gloo uses the interface of the address that this host's name resolves to.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_of(address_towards(host))
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _tensor_groups(mine: RankPosition, backend: str) -> Any:
    """Return this stage's process group; None without tensor parallelism."""
    layout: ParallelLayout = mine.layout
    own = None
    for place in places(layout):
        # torch requires that all ranks create all groups, in the same order, also those of other stages.
        if place.tp == 0 and layout.tp > 1:
            group = dist.new_group(list(place.stage_ranks), backend=backend)
            if place.stage_ranks == mine.stage_ranks:
                own = group
    return own


def _asked(tensor: Tensor, rank: int, tag: int) -> Any:
    work = dist.irecv(tensor, rank, tag=tag)
    assert work is not None
    return work


# A rank's part in span tasks, driven by its engine's messages and computed in the rank's own thread.
#
# A task is computed from inside the rank's loop and calls back into it: within layers for messages about KV, a pause or
# an end (`poll`), and at points that all ranks of the instance reach, for plans as well (`step`): while slots are
# awaited, and after a layer where the engine requests it. Plans anywhere else would deadlock: one rank would wait in a
# layer of the task, and another in a batch.

log = logging.getLogger("headway.worker")


class _OverError(Exception):
    """The current task was cancelled: unwinds its computation."""


class RankSpanExecutor:
    """One rank's `SpanExecutor`, driven by messages of the engine. `loop` is set before the first message."""

    loop: RankLoop

    def __init__(self, runs: SpanExecutor, port: KvPort, send: Callable[[SpanFromRank], None]) -> None:
        self._runs, self._port, self._send = runs, port, send
        self._tasks: dict[str, ComputeSpan] = {}
        self._name = ""
        self._hold = False
        self._resumed: list[ResumeSpan] = []
        self.over = False
        """Whether the current task is cancelled. No message is processed until it has ended."""

    def on_message(self, message: SpanToRank, prompt: memoryview | None = None) -> None:
        """Process a message of the engine; prompt: the frame behind `SubmitRequest`. Messages about forgotten requests
        are ignored."""
        name = message.id
        if isinstance(message, SubmitRequest):
            assert prompt is not None
            self._runs.admit(name, prompt, message.params, message.output)
        elif name not in self._runs:
            return
        elif isinstance(message, ComputeSpan):
            self._tasks[name] = message
            self._carry_out(message, self._begin)
        elif isinstance(message, AbortRequest):
            self.forget(name)
        elif isinstance(message, ResumeSpan) and name != self._name:
            self._carry_out(self._tasks[name], self._go)
        elif name != self._name:  # the task had come to an edge, or its end, by itself
            return
        elif isinstance(message, PauseRequest):
            # Only the group's first rank acts on it: the others follow.
            self._hold = True
        else:
            self._resumed.append(message)

    def forget(self, name: str) -> None:
        """Drop a request. Its current task, if any, ends at its next check."""
        self.over = self.over or name == self._name
        self._tasks.pop(name, None)
        self._runs.forget(name)

    def _carry_out(self, task: ComputeSpan, body: Callable[[ComputeSpan], None]) -> None:
        name = self._name = task.id
        self._hold = False
        try:
            body(task)
        except _OverError:
            pass
        except PeerLostError as error:
            self._send(SpanTaskLost(name, str(error), None if error.end is None else instance_of(error.end)))
        except HeadwayError as error:
            self._send(SpanTaskLost(name, str(error)))
        except Exception as error:
            log.exception("a run of %s failed", name)
            self._send(SpanTaskLost(name, f"it failed: {error}"))
        finally:
            # Messages behind the cancellation were deferred by `over`: they are processed from here on.
            self._name, self.over = "", False

    def _begin(self, task: ComputeSpan) -> None:
        name = task.id

        def allocate_slots(tokens: int, replace: bool) -> Sequence[tuple[int, int]]:
            return self._wait(task, 0, tokens, replace).slots

        # KV that still moves from this place must be out before the task may write to it.
        self._port.settle(name)
        self._runs.begin(task, allocate_slots, self._look)
        self._go(task)

    def _go(self, task: ComputeSpan) -> None:
        name = task.id

        def behind(layers: int) -> None:
            self._port.layers_are_there(name)
            if not task.beside:
                self._look()
                return
            self._wait(task, layers)

        def pause() -> bool:
            self._look()
            return self._hold

        if self._runs.go(name, pause, behind):
            self._finish(name)
            return
        self._send(self._runs.saved(name, task.index))

    def _finish(self, name: str) -> None:
        emitted, moved = self._runs.finish(name)
        # Transfers that still read the old place must end before its slots are reused.
        if moved:
            self._port.settle(name)
        self._port.layers_are_there(name)
        whole = self._runs.whole_tokens(name)
        self._send(SpanTaskDone(id=name, index=self._tasks[name].index, emitted=emitted, moved=moved, whole=whole))

    def _look(self) -> None:
        self.loop.poll()
        self._check()
        self._runs.check(self._name)

    def _wait(self, task: ComputeSpan, layer: int, slots: int = 0, replace: bool = False) -> ResumeSpan:
        """Return what the engine answers; carry out its plans meanwhile."""
        self._resumed.clear()
        waits = SpanTaskPaused(id=task.id, index=task.index, layer=layer, waits=True, slots=slots, replace=replace)
        self._send(waits)
        while not self._resumed:
            self.loop.step()
            self._check()
        return self._resumed.pop()

    def _check(self) -> None:
        if self.over or self.loop.stopped:
            raise _OverError


# One rank's end of KV transfers: it sends and receives its own heads, over connections of its own.
#
# Requests for transfers come between plans, and within span tasks, in the rank's own thread. A slice of a request that
# is still being computed follows chunk by chunk, or layer by layer of a task, as this rank computes it, without a
# message of the engine. Arrivals are reported at once by a thread of their own, whatever the rank computes meanwhile.

_NO_LIFE = -1
_NO_NAME = ""


class RankKvTransfer:
    """The KV transfers of one tensor-parallel rank.

    `say` and `aside` send a message to the engine, the latter from any thread. ConfigError for an address that it
    cannot have, and an unknown connector.
    """

    def __init__(
        self,
        worker: ModelWorker,
        config: DecoderConfig,
        eos: tuple[int, ...],
        block_tokens: int,
        peer: InstanceConfig,
        say: Callable[[InstanceFromRank], None],
        aside: Callable[[InstanceFromRank], None],
    ) -> None:
        """config: the whole model's."""
        self._worker, self._say, self._aside = worker, say, aside
        shard = worker.decoder.shard
        end, address = end_of(peer.number, shard.rank), peer.rank_address(shard.rank)
        self._peers = PeerNetwork(end, peer.incarnation, address, peer.secret)
        self._rung = threading.Event()
        self._ends = False
        connector = make_connector(peer.kv_connector, self._peers, self._rung.set, config.kv_heads, shard.ranks)
        heads = heads_of(config.kv_heads, shard.ranks, shard.rank)
        runs = SpanExecutor(worker, self._peers, eos, config)
        self._port = KvPort(worker, block_tokens, runs, connector, self._peers.number, heads)
        self.runs = RankSpanExecutor(runs, self._port, say)
        worker.on_free = self._leaving
        self._names: dict[str, str] = {}
        self._computed: dict[str, int] = {}
        self._lives: dict[str, int] = {}
        self._teller = threading.Thread(target=self._tell, name="kv aside", daemon=True)
        self._teller.start()

    @property
    def address(self) -> str:
        """Where other instances find this rank."""
        return self._peers.address

    def on_message(self, said: InstanceToRank, prompt: memoryview | None) -> None:
        """The engine's word, in order with the plans that have been carried out. prompt: the frame behind
        `SubmitRequest`."""
        if isinstance(said, MeetPeers):
            self._peers.meet(said.peers)
        elif isinstance(said, ReserveKv):
            self._names[str(said.number)] = said.id
            self._lives[said.id] = said.serial
            self._port.receive(said.id, said.tokens, self._worker.tables.runs(str(said.number)))
            self._say(said)
        elif isinstance(said, SendKv):
            owner = str(said.number)
            if said.number:
                self._names[owner] = said.id
            self._port.send(SaveKv(said.id, said.piece, said.to), said.start, said.end)
            self._port.layers_are_there(said.id)
            self._advance(owner, max(said.there, self._computed.get(owner, 0)))
        elif isinstance(said, AbortRequest) and said.number is None:
            if said.for_good:
                self._peers.forget(said.id)
            self._port.forget(said.id)
            self.runs.forget(said.id)
            self._lives.pop(said.id, None)
            self._names = {owner: name for owner, name in self._names.items() if name != said.id}
        else:
            if isinstance(said, AbortRequest) and said.number:
                self._names[str(said.number)] = said.id
            self.runs.on_message(said, prompt)

    def computed(self, part: GroupBatch) -> None:
        """A part has been computed here: what it added may go."""
        for chunk in part.prefills:
            self._computed[chunk.request] = chunk.start + chunk.tokens
            self._advance(chunk.request, chunk.start + chunk.tokens)

    def close(self) -> None:
        """Nothing comes or goes any more."""
        self._ends = True
        self._rung.set()
        self._teller.join()
        self._port.close()
        self._peers.close()

    def _advance(self, owner: str, tokens: int) -> None:
        name = self._names.get(owner, _NO_NAME)
        if tokens and name in self._port.sending():
            self._port.tokens_are_there(name, tokens, self._worker.tables.runs(owner))

    def _leaving(self, owner: str) -> None:
        """A request's blocks are about to be others'."""
        self._computed.pop(owner, None)
        name = self._names.get(owner)
        if name is not None:
            self._port.settle(name)

    def _tell(self) -> None:
        while True:
            self._rung.wait()
            self._rung.clear()
            if self._ends:
                return
            for end in self._port.finished():
                if isinstance(end, KvArrived):
                    serial = self._lives.get(end.id, _NO_LIFE)  # before it is asked whether that one's is whole
                    end = msgspec.structs.replace(end, whole=not self._port.awaits(end.id), serial=serial)
                self._aside(end)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class RankLoop:
    """Drives one worker by the engine's plan stream until `EndProcess`.

    A rank that has missed a plan fails with the next one, and the engine starts its ranks again. kv: moves KV to and
    from other instances; None where KV does not move.
    """

    def __init__(self, worker: ModelWorker, channel: ZmqChannel, kv: RankKvTransfer | None = None) -> None:
        self._worker = worker
        self._channel = channel
        self._kv = kv
        # With the plan that each follows, and the frame behind it.
        self._control_messages: deque[tuple[int, InstanceToRank, memoryview | None]] = deque()
        self._admitted: dict[int, int] = {}
        self._plans = PlanReader()
        self._queue: deque[tuple[BatchPlan, GroupBatch]] = deque()
        self._replayed_seq = 0
        self.stopped = False
        if kv is not None:
            kv.runs.loop = self

    def serve(self) -> None:
        """Run until `EndProcess`. Raises what the worker raises."""
        while not self.stopped:
            self.step()

    def step(self) -> None:
        """Process the next message or carry out the next plan; blocks while there is neither.

        Also called from within a span, at points that all ranks of the instance reach.
        """
        # Control messages are ordered with plans: this one precedes the plans that were sent behind it.
        if self._control_is_due:
            self._take_control_messages()
            return
        frames = self._channel.receive(wait=not self._queue)
        if frames is not None:
            self._on_message(_decoder.decode(frames[0]), frames[1:])
        elif self._queue:
            self._carry_out(*self._queue.popleft())
        self._take_control_messages()

    def poll(self) -> None:
        """Process messages that have arrived, and carry out plans up to the first that computes. Never blocks.

        Called from within a span. A plan that computes would wait for other ranks, which may still be in the span.
        """
        while not self.stopped and (frames := self._channel.receive(wait=False)) is not None:
            self._on_message(_decoder.decode(frames[0]), frames[1:])
        self._take_control_messages()
        # Plans without rows only replay block operations, which never wait for other ranks.
        while self._queue and not (self._queue[0][1].tokens or self._queue[0][1].assists or self._span_is_ending):
            self._carry_out(*self._queue.popleft())
            self._take_control_messages()

    @property
    def _span_is_ending(self) -> bool:
        """Whether the span under way is to end: later messages are deferred until it has ended."""
        return self._kv is not None and self._kv.runs.over

    def _on_message(self, message: ToRank, frames: list[memoryview]) -> None:
        if isinstance(message, BatchPlan):
            self._enqueue(message)
        elif isinstance(message, SubmitRequest) and message.phase != "spans":
            self._admitted[int(message.id)] = self._plans.seq
            prompt = frames[0] if frames else None
            self._worker.admit(message.id, message.prompt_tokens, prompt, message.params, message.output)
        elif isinstance(message, MeasureRank):
            seconds = measure(self._worker, message.kind, message.first, message.second, message.repeats)
            self._send(MeasuredSeconds(seconds))
        elif isinstance(message, EndProcess):
            self.stopped = True
        elif isinstance(message, InstanceToRank):
            self._control_messages.append((self._plans.seq, message, frames[0] if frames else None))
        else:
            raise InvariantError(f"the engine says {message!r} to a rank that is at work")

    def _enqueue(self, plan: BatchPlan) -> None:
        """Queue a received plan, and post the receives for the rows that it needs."""
        part = self._plans.part_of(plan)
        self._worker.expect(part)
        self._queue.append((plan, part))

    def _carry_out(self, plan: BatchPlan, part: GroupBatch) -> None:
        worker = self._worker
        worker.replay(part.kv_ops)
        for number, known, tokens in plan.foreign_tokens:
            worker.learn_tokens(str(number), known, tokens)
        self._replayed_seq = plan.seq
        for request in plan.forget:
            # A request that was admitted behind this plan has the number of the one that ended.
            if plan.seq > self._admitted.get(request, 0):
                worker.forget(str(request))
                self._admitted.pop(request, None)
        query_targets = tuple((group, tuple(map(str, numbers))) for group, numbers in plan.query_targets)
        emitted = worker.run(part, query_targets)
        if self._kv is not None:
            self._kv.computed(part)
        logprobs = tuple(one.logprobs for one in emitted)
        tokens = tuple(one.token for one in emitted)
        # An empty tuple stands for no log-probabilities at all: most plans need none on the wire.
        reported = logprobs if any(one is not None for one in logprobs) else ()
        self._send(PlanDone(plan.seq, worker.began_s, time.monotonic(), tokens, reported))

    def _take_control_messages(self) -> None:
        """Process control messages of KV transfers whose preceding plans have been replayed."""
        while self._kv is not None and self._control_is_due:
            _, message, frame = self._control_messages.popleft()
            self._kv.on_message(message, frame)

    @property
    def _control_is_due(self) -> bool:
        waiting = self._control_messages
        return bool(waiting) and waiting[0][0] <= self._replayed_seq and not self._span_is_ending

    def _send(self, message: FromRank) -> None:
        self._channel.send(_encoder.encode(message))


def failure(error: BaseException) -> FatalError:
    """Return the message that reports an error to the engine."""
    return FatalError(f"{type(error).__name__}: {error}", final=False)
