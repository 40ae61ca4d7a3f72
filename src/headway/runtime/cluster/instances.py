"""An instance of a cluster as the controller sees it: its processes, its load, what it has cached, and what operators
can read and change.

Unlike `runtime.engine.client`, nothing is recovered when a process is lost: all KV on it is gone, and an empty process
takes its place. The controller, which gets `InstanceRoster.lost`, restarts the requests that were there.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from headway.kv.text_keys import KEY_BYTES, TextKeys
from headway.policy.placement.contract import ClusterInstance, RateTable, Role
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.process import EngineProcess, EngineSupervisor, Message
from headway.runtime.engine.protocol import (
    CacheChanges,
    EndProcess,
    EngineInfo,
    EngineStats,
    FatalError,
    IterationOutputs,
    PeerAddress,
    SubmitRequest,
)

if TYPE_CHECKING:
    from headway.runtime.cluster.client import InstanceRoster
    from headway.runtime.cluster.requests import ClusterRequest


class InstanceLoad:
    """Requests on one instance's scheduler, the uncomputed tokens of their prompts, and the seconds that these take.

    Each snapshot has the engine's count of prefill tokens over all requests, not per request: progress is spread over
    the waiting prompts by length.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, float]] = {}
        self._here: set[str] = set()
        self._tokens, self._seconds = 0, 0.0
        self._credit = 0
        self._counted = 0

    def add(self, request: str, prompt_tokens: int, prefill_s: float) -> None:
        """Add a request whose prefill takes `prefill_s` seconds on an idle instance."""
        # Nothing waits: what was computed beyond the known prompts must not count for this one.
        if not self._waiting:
            self._credit, self._tokens, self._seconds = 0, 0, 0.0
        self._waiting[request] = (prompt_tokens, prefill_s)
        self._tokens += prompt_tokens
        self._seconds += prefill_s

    def entered(self, request: str) -> None:
        """Note a request on the scheduler, or one that will be there as soon as its KV has arrived."""
        self._here.add(request)

    def left(self, request: str) -> None:
        """Note that a request is not on the scheduler any more. Harmless when repeated."""
        self._here.discard(request)

    @property
    def requests(self) -> int:
        """Number of requests on the scheduler."""
        return len(self._here)

    def first_token(self, request: str) -> None:
        """Note that a request's prompt is computed. Harmless when repeated."""
        # Its tokens leave both the total and the credit: the progress was made on this prompt.
        self._credit = max(0, self._credit - self._pop(request))

    def remove(self, request: str) -> None:
        """Remove a request that has ended or left."""
        self._pop(request)
        self._here.discard(request)

    def _pop(self, request: str) -> int:
        """Take a request's prompt out of the waiting ones; return its tokens."""
        tokens, seconds = self._waiting.pop(request, (0, 0.0))
        self._tokens -= tokens
        self._seconds = max(0.0, self._seconds - seconds)
        return tokens

    def take(self, stats: EngineStats) -> None:
        """Take in a snapshot; the same one may be given again."""
        # Tokens of span tasks are counted by the engine too, but are no progress of the scheduler's prompts.
        counted = stats.prefill_tokens_total - stats.run_tokens_total
        self._credit += max(0, counted - self._counted)
        self._counted = max(self._counted, counted)

    @property
    def expects(self) -> bool:
        """Whether there are prompts that are not computed."""
        return bool(self._waiting)

    @property
    def queued(self) -> int:
        """Prompt tokens that are not computed yet."""
        return max(0, self._tokens - self._credit)

    @property
    def left_s(self) -> float:
        """Predicted seconds of prefill that are not computed yet."""
        return self._seconds * self.queued / self._tokens if self._tokens else 0.0


MOST_RUNS_LOST = 16
"""`RetryLimits.runs` of native instances."""
ASSUMED_BLOCK = 64
"""Tokens of a block where the server's own are not known."""


class CachedKeys:
    """Keys of the blocks that one instance has cached. Its reports come with its outputs, at least ten times a second
    while it computes."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def take(self, changes: CacheChanges) -> None:
        """Take in a report."""
        self._keys.difference_update(_split(changes.evicted))
        self._keys.update(_split(changes.cached))

    def clear(self) -> None:
        """Forget all: the process is gone."""
        self._keys.clear()

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a prompt are cached."""
        return _match(keys, self._keys)


class AssumedKeys:
    """Keys of the texts that were sent to a server or came from it, the least recently used forgotten first."""

    def __init__(self) -> None:
        # Oldest first.
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def use(self, keys: Sequence[bytes], kv_tokens: int) -> None:
        """Note that a text is computed there. kv_tokens: of its KV cache, which holds no more."""
        # The ends of texts first: what is forgotten first is never in the middle of one.
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > kv_tokens // ASSUMED_BLOCK:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the server is gone."""
        self._keys.clear()

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks of a prompt are assumed to be cached."""
        return _match(keys, self._keys)


def text_of(
    submit: SubmitRequest,
    prompt: bytes | memoryview,
    told: Sequence[int],
    block_tokens: int,
    salt: str | None = None,
) -> TextKeys:
    """Return the keys of a request's prompt and of what its client has of the answer; none of one that shares none.

    salt: None: the request's own."""
    text = TextKeys(prompt if shares(submit) else b"", block_tokens, submit.cache_salt if salt is None else salt)
    for token in told if shares(submit) else ():
        text.append(token)
    return text


def shares(submit: SubmitRequest) -> bool:
    """Return whether a request uses and leaves cached prefixes. Scores of its prompt need logits, which KV has not."""
    return submit.prefix_cache and submit.params.prompt_logprobs is None


def shareable(text: TextKeys, tokens: int, block_tokens: int) -> list[bytes]:
    """Return the keys of a prompt of so many tokens that may be taken from a cache: its last token is computed."""
    return text.keys[: (tokens - 1) // block_tokens]


def _match(keys: Sequence[bytes], known: Container[bytes]) -> int:
    # Only ends of prefixes are evicted: a cached block's ancestors are cached too.
    return bisect_left(keys, True, key=lambda key: key not in known)


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


log = logging.getLogger("headway.cluster")

_encoder = msgspec.msgpack.Encoder()

InstanceState = Literal["starting", "ready", "draining", "lost", "failed", "left"]
"""lost: its process is gone and another one starts; failed: restarts were given up; left: it was drained and ended."""


class RetryLimits(NamedTuple):
    """How often a request is tried again."""

    losses: int
    """Instances that may be lost with it on them; with one more it counts as the cause."""
    runs: int
    """Lost tasks or streams, with or without an instance, after which it is given up."""


Launch = Callable[[EngineConfig, int], EngineProcess]
"""(settings, number of processes that had the number before) to a process that is starting."""


def initial_instance(number: int, node: int, role: Role, config: EngineConfig, kv_tokens: int) -> ClusterInstance:
    """Return an instance without any requests, as policies see it."""
    tp, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    return ClusterInstance(id=number, node=node, role=role, tp=tp, stages=stages, capacity=kv_tokens)


class LiveInstance:
    """An instance, started at construction, so that it loads while the controller's process imports its own modules.

    `look_after` runs for as long as the instance has a process.
    """

    seen: ClassVar[bool] = True
    """Whether policies see it."""
    required: ClassVar[bool] = True
    """Whether the cluster waits for it at the start."""
    returns_s: ClassVar[float] = math.inf
    """Seconds after the loss of the last instance in which new requests are accepted, and wait: another process
    starts."""

    def __init__(
        self,
        number: int,
        role: Role,
        node: int,
        pool: int,
        config: EngineConfig,
        launch: Launch,
        incarnation: int = 0,
        host: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """pool: index of the cluster file's pool. incarnation: number of processes that had the number before. host:
        where `launch` starts them. clock: seconds, of the same clock as the controller's."""
        self.number, self.role, self.node, self.pool, self.host = number, role, node, pool, host
        self.config, self._clock = config, clock
        self.state: InstanceState = "starting"
        names = f"the process of instance {number}", f"instance {number}"
        where = f" (on host {host})" if host else ""
        self._engine = EngineSupervisor(config, launch, names, incarnation, where, clock)
        self.cached = CachedKeys()
        """Keys of the blocks in its prefix cache."""
        self._doomed: str | None = None
        """Why its process was ended from here, to be started again, unless it was given up."""
        self._given_up = False
        self.heard_s = self._clock()
        """Time of the last message: an engine sends stats several times a second, whatever it does."""

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot, with the counters of earlier processes added."""
        return self._engine.stats

    @property
    def info(self) -> EngineInfo | None:
        """The process's report; None before the first is ready."""
        return self._engine.info

    @property
    def incarnation(self) -> int:
        """Number of processes that had the number before this one."""
        return self._engine.incarnation

    @property
    def failure(self) -> str | None:
        """Why it could not start, or was given up."""
        return self._engine.failure

    @property
    def serves(self) -> bool:
        """Whether the instance can be given work."""
        return self.state in ("ready", "draining")

    @property
    def moves_kv(self) -> bool:
        """Whether KV can move from and to this instance.

        It can then compute spans in a group too, with instances of as many processes; else only whole prompts, on its
        scheduler.
        """
        return self.info is not None and self.info.peer_address is not None

    @property
    def ranks(self) -> int:
        """Number of its processes that take part in a span task."""
        return 1 if self.info is None else 1 + len(self.info.peer_others)

    @property
    def pid(self) -> int:
        """Process id now; 0 until its host has reported it."""
        return self._engine.process.pid or 0

    @property
    def limits(self) -> RetryLimits:
        """How often a request is tried again."""
        return RetryLimits(self.config.max_restarts, MOST_RUNS_LOST)

    def cached_tokens(self, asked: ClusterRequest) -> int:
        """Return how many tokens of a request's prompt, answer so far included, it has cached."""
        if self.info is None or not self.info.prefix_cache:
            return 0
        size, tokens = self.info.kv_block_tokens, asked.submit.prompt_tokens + len(asked.told)
        return size * self.cached.match(shareable(asked.text(size), tokens, size))

    @property
    def initial_instance(self) -> ClusterInstance:
        """The instance without any requests, as policies see it."""
        kv_tokens = 0 if self.info is None else self.info.kv_tokens_total
        return initial_instance(self.number, self.node, self.role, self.config, kv_tokens)

    @property
    def peer(self) -> PeerAddress | None:
        """Address for other instances; None when they cannot reach this one."""
        if self.info is None or self.info.peer_address is None or not self.serves:
            return None
        return PeerAddress(self.number, self.incarnation, self.info.peer_address, self.info.peer_others)

    def tell(self, message: msgspec.Struct, *frames: Any) -> None:
        """Send a message. Never blocks; what the process has not read when it ends is lost with it."""
        if self.serves:
            self._engine.process.send([_encoder.encode(message), *frames])

    def submit(self, submit: SubmitRequest, prompt: bytes | memoryview) -> None:
        """Give the scheduler a request. The engine's own queue limit does not apply: the cluster has one."""
        # On another host the monotonic clock differs: times leave in the instance's clock.
        received_s = submit.received_s - self._engine.process.ahead_s
        self.tell(msgspec.structs.replace(submit, resubmitted=True, received_s=received_s), prompt)

    def drain(self) -> None:
        """Finish what is there, take nothing new, then end. The state becomes `left`."""
        if self.serves:
            self.tell(EndProcess())
        else:
            self._engine.end()
        if self.state != "failed":
            self.state = "draining"

    def fail(self, why: str) -> None:
        """Give up an instance that cannot be part of this cluster."""
        self._fail(why)
        self._engine.end()

    def restart(self, why: str, for_good: bool) -> None:
        """End the process at once, as if it had been lost. for_good: without starting another one."""
        self._doomed, self._given_up = why, for_good
        self._engine.end()

    def end(self) -> None:
        """End the process, whatever it is doing. Harmless when repeated."""
        if self.state not in ("failed", "left"):
            self.state = "left"
        self._engine.process.end()

    async def close(self) -> None:
        """As `end`."""
        self.end()

    # -- one process after another ----------------------------------------------------------------------------------

    async def look_after(self, listener: InstanceRoster) -> None:
        """Run the instance's processes, one after another, until it has left or is given up; report to `listener`."""
        try:
            while True:
                why = await self._engine.watch(partial(self._receive, listener))
                served, leaves = self._engine.process.served, self.state == "draining"
                if self.state == "failed":
                    break
                why, self._doomed = self._doomed or why, None
                self._engine.process.end(at_once=True)
                # The state before the listener: it must not place anything here while it handles the loss.
                self.state = "left" if leaves else "lost"
                self.cached.clear()
                self._engine.clear_gauges()
                if served:
                    listener.lost(self.number, why)
                # Asked again: the listener may have drained the instance while it handled the loss.
                if leaves or self._leaves():
                    self.state = "left"
                    break
                if self._given_up:
                    self._fail(why)
                    break
                if not self._engine.replace(why):
                    self._fail(self._engine.failure or why)
                    break
        except Exception as error:
            log.exception("instance %d cannot be looked after", self.number)
            self._fail(f"it cannot be looked after: {error}")
            self._engine.process.end(at_once=True)
            listener.lost(self.number, str(error))
        listener.ended(self.number)

    def _leaves(self) -> bool:
        """Whether the instance is being drained."""
        return self.state == "draining"

    def _receive(self, listener: InstanceRoster, message: Message) -> None:
        """Handle one message of the process; the supervisor has taken in stats, report and error."""
        self.heard_s = self._clock()
        if isinstance(message, IterationOutputs):
            # Before the deltas: what follows from a token is decided by the newest free and cached blocks.
            if message.cache is not None:
                self.cached.take(message.cache)
            if message.stats is not None:
                listener.measured(self.number)
            if message.samples is not None:
                listener.sampled(self.number, message.samples)
            for delta in message.deltas:
                listener.heard(self.number, delta)
        elif isinstance(message, EngineInfo):
            if self.state != "draining":
                self.state = "ready"
            listener.joined(self.number)
        elif isinstance(message, FatalError):
            log.error("instance %d: %s", self.number, message.error)
        else:
            listener.said(self.number, message)

    def _fail(self, why: str) -> None:
        self.state, self._engine.failure = "failed", why
        log.error("instance %d is lost for good: %s", self.number, why)


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one instance now.

    host: where it runs, 0 is the controller's host; node: as policies see it. waiting, running: requests in its
    scheduler; placed: requests of which any part is or will be there; queued_tokens: of prompts, not computed;
    free_in_s: predicted seconds until all that is placed there is prefilled; failure: why it was given up.
    """

    id: int
    role: Role
    node: int
    host: int = 0
    pool: int
    state: InstanceState
    incarnation: int
    pid: int
    placed: int
    running: int
    waiting: int
    queued_tokens: int
    free_in_s: float
    kv_tokens_used: int
    kv_tokens_total: int
    prefill_tokens_total: int
    decode_tokens_total: int
    restarts_total: int
    failure: str | None = None


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the cluster now."""

    schema: Literal["headway.cluster/1"] = "headway.cluster/1"
    placement: str
    state: str
    requests: int
    waiting: int
    """Requests that have not begun anywhere."""
    transfers: int = 0
    """KV movements under way or due."""
    decodes_moved: int = 0
    """How often so far a decode left a scheduler to continue elsewhere."""
    groups_grown: int = 0
    """How often so far a group that decodes in place got instances."""
    groups_shrunk: int = 0
    """How often so far a group that decodes in place lost instances."""
    instances: Sequence[InstanceReport]


@runtime_checkable
class InstanceAdmin(Protocol):
    """What the endpoints for operators need of a cluster's client."""

    def report(self) -> ClusterReport:
        """Return the state of the cluster, instances by id."""

    def join(self, pool: int) -> InstanceReport:
        """Start one more instance like those of a pool; it gets work once it is ready. Raises RequestError."""

    def leave(self, number: int) -> InstanceReport:
        """Drain an instance: nothing new is placed on it, and it ends when nothing is left there. Raises RequestError
        for an unknown number, and for an instance without which the cluster could not serve."""

    def replace_rates(self, table: RateTable) -> None:
        """Use another table of Tetris's improvement rates from the next decision on. Raises RequestError where the
        policy has no such rates."""
