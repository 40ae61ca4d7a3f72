"""Instances for tests of a router: they keep books of KV instead of KV, and complain of what no engine could do.

What an instance says next depends on all that is known of a request, so that an answer shows whether anything was lost.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.helpers.fake_engine import INFO
from tests.router.virtual_time import pause

from headway.core.request import SpanTask, cut
from headway.kv.text_keys import TextKeys
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.process import EngineProcess
from headway.runtime.engine.protocol import (
    AbortRequest,
    CacheChanges,
    ComputeSpan,
    EndProcess,
    EngineInfo,
    EngineStats,
    FatalError,
    FromInstance,
    IterationOutputs,
    KvArrived,
    MeetPeers,
    OutputDelta,
    PauseRequest,
    ReserveKv,
    ResumeSpan,
    SendKv,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
    SubmitRequest,
    ToInstance,
)

LAYERS = 4
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AbortRequest | EndProcess | ToInstance)


def next_token(known: Sequence[int]) -> int:
    """What any instance says behind `known`."""
    return 2 + (sum(known[-5:]) * 31 + len(known) * 7) % 400


def answer(prompt: Sequence[int], count: int) -> list[int]:
    """What an undisturbed instance says."""
    known = list(prompt)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(prompt) :]


@dataclass
class Known:
    """A request at an instance."""

    tokens: list[int]
    count: int
    room: int = 0

    def __post_init__(self) -> None:
        self.length = len(self.tokens)


@dataclass
class FakeCluster:
    """All instances, by number; `launcher(n)` starts processes. Times in seconds. `complaints` must stay empty. full:
    room for KV is limited (it is for what is kept for others; whatever is computed finds some). apart: two that cannot
    reach each other, either way. longest: request that an instance holds; kv_bytes: that those who join were given.
    caches: instances report the blocks of prompts that their schedulers have computed. evicts: so many spans
    behind a cached prefix are lost, because it was evicted."""

    token_s: float = 0.0
    run_s: float = 0.0
    send_s: float = 0.0
    start_s: float = 0.0
    kv_tokens: int = 8192
    full: bool = False
    caches: bool = False
    evicts: int = 0
    processes: dict[int, FakeProcess] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    kv: dict[str, dict[int, set[int]]] = field(default_factory=dict)
    log: list[tuple[int, Any]] = field(default_factory=list)
    longest: dict[int, int] = field(default_factory=dict)
    kv_bytes: list[int | None] = field(default_factory=list)
    refuse: Callable[[int, int], str | None] = lambda number, serial: None
    apart: Callable[[FakeProcess, FakeProcess], bool] = lambda one, other: False

    def launcher(self, number: int) -> Callable[[EngineConfig, int], FakeProcess]:
        """See `runtime.cluster.instances.Launch`."""

        def launch(config: EngineConfig, serial: int) -> FakeProcess:
            process = self.processes[number] = FakeProcess(self, number, serial)
            return process

        return launch

    def said(self, kind: type) -> list[Any]:
        """All messages of a kind that instances were told, in order."""
        return [message for _, message in self.log if isinstance(message, kind)]

    def kill(self, number: int) -> None:
        """Its process ends, and its KV is gone."""
        self.processes[number].die("has ended with SIGKILL")

    def peers_hear(self, number: int) -> None:
        for other in list(self.processes.values()):
            if other.number != number and other.alive:
                other.peer_lost(number)


class FakeProcess(EngineProcess):
    """Stands for an engine that is started."""

    ahead_s = 0.0
    abandoned = False
    pid: int = 0

    def __init__(self, cluster: FakeCluster, number: int, serial: int) -> None:
        self.cluster, self.number, self.serial = cluster, number, serial
        self.fatal_error: FatalError | None = None
        self.served = False
        self.alive = True
        self.pid = 1000 * serial + number
        self.requests: dict[str, Known] = {}
        self.scheduled: dict[str, asyncio.Task[None]] = {}
        self.runs: dict[str, ComputeSpan] = {}
        self.decoding: dict[str, Known] = {}
        self.paused: dict[str, int] = {}
        self.stopped: set[str] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.counted = 0
        self.line: dict[str, int] = {}
        self.serials: dict[str, int] = {}
        self.draining = False
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self._gone: asyncio.Future[str] | None = None
        self._why: str | None = None
        why = cluster.refuse(number, serial)
        if why is not None:
            self.fatal_error = FatalError(why)
            self._why, self.alive = "has ended with exit code 2", False
        else:
            self._out.put_nowait(
                msgspec.structs.replace(
                    INFO,
                    kv_tokens_total=cluster.kv_tokens,
                    kv_bytes=1000 + number,
                    max_model_len=cluster.longest.get(number, cluster.kv_tokens),
                    context_tokens=1 << 20,
                    peer_address=f"fake:{number}:{serial}",
                    prefix_cache=cluster.caches,
                    latency=None,
                )
            )

    # -- as a process -------------------------------------------------------------------------------------------------

    async def receive(self) -> EngineInfo | IterationOutputs | FatalError | FromInstance:
        message: EngineInfo | IterationOutputs | FatalError | FromInstance = await self._out.get()
        if isinstance(message, EngineInfo) and self.serial:
            await pause(self.cluster.start_s)
        return message

    def ready(self) -> None:
        self.served = True

    async def wait_until_exited(self) -> str:
        if self._gone is None:
            self._gone = asyncio.get_running_loop().create_future()
            if self._why is not None:
                self._gone.set_result(self._why)
        return await asyncio.shield(self._gone)

    def end(self, at_once: bool = False) -> None:
        self.die("has ended with SIGKILL")

    def die(self, why: str) -> None:
        if not self.alive:
            return
        self.alive, self._why = False, why
        for task in (*self.tasks, *self.scheduled.values()):
            task.cancel()
        for held in self.cluster.kv.values():
            held.pop(self.number, None)
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(why)
        self.cluster.peers_hear(self.number)

    def send(self, frames: Sequence[Any]) -> None:
        if not self.alive:
            return
        message = _decoder.decode(frames[0])
        if not isinstance(message, SubmitRequest) or message.phase != "spans":
            self.cluster.log.append((self.number, message))
        ids = array("i", bytes(frames[1])).tolist() if len(frames) > 1 else []
        match message:
            case SubmitRequest(phase="spans"):
                self._admit(message, ids)
            case SubmitRequest():
                self._submit(message, ids)
            case EndProcess():
                self.draining = True
                self._do(self._drain())
            case ComputeSpan():
                self._compute(message)
            case PauseRequest(id=name) if name in self.scheduled:
                self._halt(name)
            case PauseRequest(id=name):
                self._pause(name)
            case ResumeSpan(id=name):
                self._resume(name)
            case ReserveKv(id=name, tokens=tokens, serial=serial):
                self._reserve(name, tokens, serial)
            case SendKv():
                self._begin_to_send(message)
            case AbortRequest(id=name):
                self._forget(name)
            case MeetPeers():
                pass

    def _admit(self, admit: SubmitRequest, ids: list[int]) -> None:
        if len(ids) != admit.prompt_tokens:
            self._complain(f"admitted {admit.id} with {len(ids)} tokens")
        left = admit.params.max_tokens - len(admit.output)
        self.requests[admit.id] = Known([*ids, *admit.output], left)

    def _pause(self, name: str) -> None:
        """The first of the group pauses all of it."""
        run = self.runs.get(name)
        if run is not None and run.run.group[0] == self.number:
            for i in run.run.group:
                self.cluster.processes[i].paused[name] = 1

    def _resume(self, name: str) -> None:
        self.paused.pop(name, None)
        self.stopped.discard(name)
        run = self.runs.get(name)
        if run is not None and run.run.group[0] == self.number:
            self._do(self._run(run))

    def _reserve(self, name: str, tokens: int, serial: int) -> None:
        if name not in self.requests:
            self._complain(f"ReserveKv for {name}, which was not admitted")
            return
        self.line[name] = tokens
        self.serials[name] = serial
        self._grant()

    def _forget(self, name: str) -> None:
        known = self.requests.get(name)
        if self.cluster.caches and known is not None:
            prompt = known.tokens[: known.length]
            if self.cluster.kv.get(name, {}).get(self.number) == set(range(known.length)):
                self._cache(prompt, "")
        self._leave(name)
        self.requests.pop(name, None)
        self.runs.pop(name, None)
        self.cluster.kv.get(name, {}).pop(self.number, None)
        self.line.pop(name, None)
        self._grant()

    def _grant(self) -> None:
        """To those who wait for room, in order of asking."""
        for name, tokens in list(self.line.items()):
            if self.cluster.full and self.used() + tokens > self.cluster.kv_tokens:
                return
            del self.line[name]
            self.requests[name].room = tokens
            self.beat()
            self._say(ReserveKv(name, tokens, self.serials[name]))

    def used(self) -> int:
        """Tokens of KV that are here, or that room is kept for."""
        there = {key: len(held[self.number]) for key, held in self.cluster.kv.items() if self.number in held}
        rooms = {key: known.room for key, known in self.requests.items()}
        decodes = {key: len(self.decoding[key].tokens) for key in self.scheduled}
        return sum(max(there.get(key, 0), rooms.get(key, 0), decodes.get(key, 0)) for key in {*there, *rooms, *decodes})

    def beat(self) -> None:
        """Say a snapshot."""
        self._say(IterationOutputs(deltas=(), stats=self.stats()))

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.scheduled),
            prefill_tokens_total=self.counted,
            kv_tokens_used=self.used(),
            kv_tokens_total=self.cluster.kv_tokens,
        )

    # -- its scheduler ------------------------------------------------------------------------------------------------

    def _submit(self, submit: SubmitRequest, ids: list[int]) -> None:
        phase = getattr(submit, "phase", "all")
        known = Known([*ids, *submit.output], submit.params.max_tokens - len(submit.output))
        if len(ids) != submit.prompt_tokens:
            self._complain(f"submitted {submit.id} with {len(ids)} tokens")
        if phase == "decode":
            missing = set(range(len(known.tokens) - 1)) - self.cluster.kv.get(submit.id, {}).get(self.number, set())
            if missing:
                self._complain(f"{submit.id} decodes on {self.number} without KV of {len(missing)} tokens")
        self.decoding[submit.id] = known
        if self.cluster.caches:
            self._cache(ids, submit.cache_salt)
        self.scheduled[submit.id] = asyncio.get_running_loop().create_task(self._stay(submit.id, known, phase))

    def _cache(self, ids: Sequence[int], salt: str) -> None:
        keys = TextKeys(array("i", ids).tobytes(), INFO.kv_block_tokens, salt).keys
        self._say(IterationOutputs(deltas=(), cache=CacheChanges(b"".join(keys), b"")))

    async def _stay(self, name: str, known: Known, phase: str) -> None:
        if phase != "decode":
            await pause(self.cluster.run_s)
            self.counted += len(known.tokens)
        for number in range(known.count):
            if number:
                await pause(self.cluster.token_s)
            token = next_token(known.tokens)
            last = number == known.count - 1
            known.tokens.append(token)
            self._delta(OutputDelta(id=name, tokens=(token,), finish="length" if last else None, first_scheduled_s=1.0))
            if phase == "prefill" and not last:
                self.cluster.kv[name] = {self.number: set(range(len(known.tokens) - 1))}
                del self.scheduled[name]
                self._delta(OutputDelta(id=name, staged=len(known.tokens) - 1))
                return
        self.scheduled.pop(name, None)
        self.cluster.kv.get(name, {}).pop(self.number, None)
        self._grant()

    def _halt(self, name: str) -> None:
        """Between two tokens."""
        task = self.scheduled.pop(name, None)
        if task is not None:
            task.cancel()
            tokens = len(self.decoding[name].tokens) - 1
            self.cluster.kv[name] = {self.number: set(range(tokens))}
            self._delta(OutputDelta(id=name, staged=tokens))

    def _leave(self, name: str) -> None:
        task = self.scheduled.pop(name, None)
        if task is not None:
            task.cancel()

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _compute(self, message: ComputeSpan) -> None:
        if message.id not in self.requests:
            self._complain(f"ComputeSpan of {message.id}, which was not admitted")
        computing = [name for name, run in self.runs.items() if not run.run.in_place and name not in self.stopped]
        if not message.run.in_place and computing:
            self._complain(f"two runs at once: {message.id} and {computing[0]}")
        self.runs[message.id] = message
        self._learn(message)
        group = [self.cluster.processes.get(i) for i in message.run.group]
        for one in group:
            if one is not None and one is not self and self.cluster.apart(self, one):
                del self.runs[message.id]
                self._say(SpanTaskLost(message.id, f"instance {one.number} cannot be reached", one.number))
                return
        if message.cached and self._begins_cached(message):
            return
        if any(one is None or not one.alive for one in group):
            del self.runs[message.id]
            self._say(SpanTaskLost(message.id, "a peer is gone"))
            return
        if all(one is not None and one.runs.get(message.id) == message for one in group):
            first = self.cluster.processes[message.run.group[0]]
            first._do(first._run(message))

    def _begins_cached(self, message: ComputeSpan) -> bool:
        """Take the KV before a span from the cache of its instance; True: that has evicted it."""
        (prefix,) = message.before
        if (prefix.start, prefix.end) != (0, message.run.start) or not set(prefix.group) <= set(message.run.group):
            self._complain(f"{message.id}: a prefix of {prefix} before {message.run}")
        if prefix.group != (self.number,):
            return False
        if self.cluster.evicts:
            self.cluster.evicts -= 1
            del self.runs[message.id]
            self._say(SpanTaskLost(message.id, "1 of 2 cached tokens are gone, or no room is beside them"))
            return True
        self.cluster.kv[message.id] = {self.number: set(range(prefix.end))}
        return False

    def _learn(self, message: ComputeSpan) -> None:
        """Each of a group takes down what was drawn: any may be the next to draw."""
        known = self.requests.get(message.id)
        if known is None:
            return
        if message.drawn:
            known.tokens[message.run.end - len(message.drawn) :] = message.drawn
        if message.last and len(known.tokens) != message.run.end:
            self._complain(f"{message.id}: a run up to {message.run.end}, of which {len(known.tokens)} are known")

    async def _run(self, message: ComputeSpan) -> None:
        """By the first of the group, for all."""
        name, group = message.id, [self.cluster.processes[i] for i in message.run.group]
        await pause(self.cluster.run_s)
        if any(name not in one.runs for one in group):
            return
        if name in self.paused:
            for one in group:
                one.stopped.add(name)
                one._say(_paused(name, message))
            return
        self._hold(name, message.run)
        for one in group:
            del one.runs[name]
            delta = None
            known = one.requests[name]
            if message.last and one is group[0]:
                said = message.run.end - known.length
                token = next_token(known.tokens)
                delta = OutputDelta(id=name, tokens=(token,), finish="length" if said + 1 == known.count else None)
            if not message.run.in_place or message.run.keepers:
                one.beat()
            cached = message.run.start if message.cached else 0
            one._say(
                SpanTaskDone(
                    id=name,
                    index=message.index,
                    began_s=1.0,
                    ended_s=2.0,
                    cached_tokens=cached,
                    saved_s=cached / 1000,
                    delta=delta,
                )
            )

    def _hold(self, name: str, run: SpanTask) -> None:
        """Earlier KV is spread over the group, as the engines do, and the run's behind it."""
        held = self.cluster.kv.setdefault(name, {})
        before = set().union(*held.values()) if held else set()
        if before != set(range(run.start)):
            self._complain(f"{name}: a run from {run.start} on with KV of {len(before)} tokens")
        if not {i for i, tokens in held.items() if tokens} <= set(run.group):
            self._complain(f"{name}: a run on {run.group} though {sorted(held)} hold KV")
        if run.in_place:
            gone = set(run.group) - set(run.keepers) if run.keepers else set()
            fresh = set(range(run.start, run.end)).union(*(held.pop(i, set()) for i in gone))
            held.setdefault(run.group[0], set()).update(fresh)
            return
        size = len(run.group)
        self.cluster.kv[name] = {i: set(range(k, run.end, size)) for k, i in enumerate(run.group)}

    def peer_lost(self, number: int) -> None:
        for name, run in list(self.runs.items()):
            if number in run.run.group:
                del self.runs[name]
                self._say(SpanTaskLost(name, f"instance {number} is gone"))

    # -- KV -----------------------------------------------------------------------------------------------------------

    def _begin_to_send(self, send: SendKv) -> None:
        target = self.cluster.processes[send.to]
        if self.cluster.apart(self, target):
            self._say(SpanTaskLost(send.id, f"instance {target.number} cannot be reached", target.number))
            return
        known = target.requests.get(send.id)  # a new process knows nothing of it, and does not mind
        if known is not None and known.room < send.end:
            self._complain(f"{send.id}: KV is sent to {send.to}, which has no room for it")
        self._do(self._send_kv(send, target))

    async def _send_kv(self, send: SendKv, target: FakeProcess) -> None:
        while send.id in self.runs:  # what the run under way computes comes when it has
            await pause(0.001)
        await pause(self.cluster.send_s)
        held = self.cluster.kv.get(send.id, {})
        mine = held.get(self.number, set()) & set(range(send.start, send.end))
        if not target.alive or send.id not in target.requests:
            return
        held.setdefault(send.to, set()).update(mine)
        target._say(KvArrived(send.id, send.piece, self.number, 1.0, 2.0))

    # -- what it says -------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        while self.scheduled:
            await pause(0.001)
        self.die("has ended with exit code 0")

    def _delta(self, delta: OutputDelta) -> None:
        self._say(IterationOutputs(deltas=(delta,), stats=self.stats()))

    def _say(self, message: Any) -> None:
        if self.alive:
            self._out.put_nowait(message)

    def _do(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _complain(self, what: str) -> None:
        self.cluster.complaints.append(f"instance {self.number}: {what}")


def _paused(name: str, message: ComputeSpan) -> SpanTaskPaused:
    """In the first layer of the piece in the middle."""
    run = message.run
    pieces = cut(run.start, run.end, len(run.group), run.rows)
    tokens = pieces[len(pieces) // 2][0]
    return SpanTaskPaused(
        id=name, index=message.index, tokens=tokens, layer=1, kv_bytes=10, activation_bytes=1, kv_bytes_at_end=20
    )
