"""Messages between the server, the engines and the instances of a cluster, and the addresses to which they go.

The server process never imports torch; the engine process never handles HTTP. They exchange the messages below (msgspec
over ZeroMQ). A prompt is sent once, as one binary frame of little-endian int32 behind the message that announces it; no
later message grows with its length.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from headway.core.batch import EmittedToken
from headway.core.errors import ConfigError, HeadwayError
from headway.core.request import Phase, SamplingParams, Slo, SpanTask, TokenLogprobs
from headway.perf.utilisation import UtilisationBase

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
Rejection = Literal["invalid", "overloaded", "unavailable"]


class SubmitRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A new request. The prompt's token ids follow as the next frame (int32, little-endian)."""

    id: str
    prompt_tokens: int
    params: SamplingParams
    received_s: float = 0.0
    """`time.monotonic()` when the server had read the request: queue time counts from here."""
    slo: Slo = Slo()
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    """Requests share cached prefixes with requests of the same salt only."""
    prefix_cache: bool = True
    """False: the request shares no cached prefix and leaves none, whatever the engine's setting."""
    pin: bool = False
    """Compute the prompt, keep its KV from eviction, and emit no token. The first delta says that it is done; the pin
    lasts until the request is aborted, or until its end is sent because other requests need the memory."""
    resubmitted: bool = False
    """Accepted before, by an engine that is gone: no queue limit refuses it."""
    output: tuple[int, ...] = ()
    """Tokens that the client already has; the answer continues after them."""
    phase: Phase | Literal["spans"] = "all"
    """"spans": the request's spans will be computed here, or its KV will arrive here; its scheduler does not have it.
    "prefill" ends with the first token and keeps the KV (`OutputDelta.staged`), unless that token ends the
    request. "decode": KV of all tokens but the last, `output` included, is staged under the id, and no queue limit
    refuses it."""


class AbortRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Drop everything of a request at the next chunk edge: its client has disconnected, a stop string matched, or it is
    elsewhere in the cluster. On an instance also its span tasks, its KV, and transfers in both directions."""

    id: str
    for_good: bool = True
    """Whether the request never comes back, so that messages of peers about it may be refused."""
    number: int | None = None
    """To a rank, to cancel its span tasks only, also the current one: transfers of its KV continue. The request's
    number in the plan stream where its blocks have become its own; else 0."""


class EndProcess(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """To an engine, on SIGTERM: finish accepted requests, reject new ones, then end. To a rank: end at once, without
    finishing plans."""


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one iteration for one request: usually one token. The last delta carries `finish`."""

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """See `EmittedToken.prompt_logprobs`."""
    finish: FinishReason | None = None
    stop_token: int | None = None
    """The end token that finished the request; it is not in `tokens`."""
    emitted_s: float = 0.0
    """`time.monotonic()` at the engine when the iteration was complete. System-wide on Linux: the server may
    subtract."""
    error: str | None = None
    """Why, with `finish == "error"`."""
    rejected: Rejection | None = None
    """The engine did not take the request on, for this reason. None: it was accepted."""
    param: str | None = None
    """The request's field at fault, with `rejected == "invalid"`."""
    retry_after_s: float = 1.0
    """When to try again, with `rejected == "overloaded"`."""
    first_scheduled_s: float | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that came from the prefix cache. Sent with the first token."""
    saved_s: float = 0.0
    """Seconds that the latency model says these would have taken alone."""
    prefilled_tokens: int = 0
    """Tokens computed so far of a request with `pin`; all of them once it is pinned."""
    staged: int | None = None
    """The request has left the scheduler, which keeps its KV of so many tokens: it is of phase "prefill" and its first
    token was sent before this, or it has been paused. Kept until `AbortRequest`, a submission of phase "decode", or a
    span task with this instance as `home`."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine, sent with outputs at most every 0.1 s and when it becomes idle. Counters never fall."""

    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    """Batches submitted to the executor and not completed."""
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    kv_tokens_cached: int = 0
    """Tokens of cached prefixes that no request uses; they give way when memory is needed."""
    prefix_queries_total: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits_total: int = 0
    """Tokens of these that were there."""
    prefill_tokens_total: int = 0
    run_tokens_total: int = 0
    """The part of `prefill_tokens_total` computed as this instance's share of spans, outside its scheduler."""
    decode_tokens_total: int = 0
    iterations_total: int = 0
    passes_total: int = 0
    """Forward passes of KV groups, which each read all weights; an iteration has one for each group that takes part."""
    kv_read_tokens_total: int = 0
    """Tokens whose KV attention read, and pairs of query and key, as `perf.utilisation.AttentionWork`; work on
    spans, outside the scheduler, is not in them."""
    attention_pairs_total: float = 0.0
    refused_late_total: int = 0
    """Requests refused because they would be late and asked for that (`Slo.refuse_late`)."""
    late: int = 0
    """Waiting requests that will be late, so that others are in time (`headway.policy.ladder`)."""
    preemptions_total: int = 0
    recomputed_tokens_total: int = 0
    busy_s_total: float = 0.0
    schedule_s_total: float = 0.0
    predicted_s_total: float = 0.0
    last_chunk_tokens: int = 0
    last_iteration_s: float = 0.0
    stage_busy_s: tuple[tuple[int, int, float], ...] = ()
    """(KV group, pipeline stage, seconds that it computed)."""
    recoveries_total: int = 0
    lost_tokens_total: int = 0
    """Tokens whose KV was lost with a worker and is computed again."""
    recovery_s_total: float = 0.0
    recovering: bool = False
    """Workers are gone and new ones start."""
    log_problem: str = ""
    """Why the event log cannot be written at present; empty: all is well."""
    engine_restarts_total: int = 0
    """Counted by the server, not by the engine."""


class ChunkSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prefill chunk of an iteration, for the live page."""

    request: str
    start: int
    tokens: int
    remaining: int
    """Tokens of the prompt that were left to compute before this chunk."""
    limit: str
    """What made it no larger (`sim.replay.ChunkLimit`)."""


class IterationSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One iteration on one stage of one KV group, or several in a row as one. Seconds of the engine's clock."""

    group: int
    stage: int
    decided_s: float
    start_s: float
    end_s: float
    predicted_s: float
    """Predicted seconds of all its iterations."""
    decodes: int
    """Most in one of its iterations."""
    chunks: tuple[ChunkSample, ...] = ()
    iterations: int = 1


class WaitingSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt that waits or is being computed, as the scheduler sees it. Seconds of the engine's clock."""

    request: str
    due_s: float
    """When its first token is due: as asked for, or by the policy's own rule."""
    work_s: float
    """Seconds that the rest of the prompt would take alone."""
    computed: int
    known: int
    """Tokens to compute in all."""


class TransferSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A KV slice that has arrived at an instance. Seconds of the receiver's clock."""

    request: str
    source: int
    """The instance that sent it."""
    start_s: float
    end_s: float


class EngineSamples(msgspec.Struct, frozen=True, array_like=True):
    """What the live page shows of the time since the last such message."""

    iterations: tuple[IterationSample, ...] = ()
    waiting: tuple[WaitingSample, ...] = ()
    """The first of all that wait, at most `iteration_sampler.MOST_WAITING`."""
    transfers: tuple[TransferSample, ...] = ()


class CacheChanges(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that were cached or evicted since the last such message: their keys (`kv.text_keys`), end to end."""

    cached: bytes
    evicted: bytes


class IterationOutputs(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """All output of one iteration, in one message."""

    deltas: tuple[OutputDelta, ...] = ()
    stats: EngineStats | None = None
    samples: EngineSamples | None = None
    """With `stats`, where the live page is on."""
    cache: CacheChanges | None = None
    """Blocks cached and evicted since the last message, of an instance of a cluster; placements read them."""


class EngineInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """Sent once, when the engine is ready to serve."""

    model: str
    architecture: str
    dtype: str
    device: str
    max_model_len: int
    """Tokens of the longest request, output included, that the model and the KV pool allow."""
    context_tokens: int
    """The same by the model alone (`--max-model-len`, else its own context)."""
    vocab_size: int
    kv_tokens_total: int
    kv_block_tokens: int
    prefix_cache: bool = False
    """Whether KV of prompts is kept for prompts that begin alike."""
    prepares: bool = False
    """Whether KV of documents can be pinned: not in clusters, nor where an event log has to tell all of a cache."""
    policy: str
    chunking: str
    mode: str
    t_target_s: float
    max_num_seqs: int
    max_queued_requests: int
    parameters: int
    weights_bytes: int
    kv_bytes: int
    eos_token_ids: tuple[int, ...] = ()
    layout: str = "tp1-pp1-kvp1"
    long_tokens: int = 8192
    """Prompts above this are long."""
    processor: str = ""
    """Name of the processor or accelerator."""
    kernels: str = ""
    """What computes attention and products, in words; empty: not known in this process."""
    threads: str = ""
    """How many threads compute, and why, in words; empty: not known in this process."""
    profile: str = ""
    """Origin of the latency model's numbers, in words."""
    utilisation: UtilisationBase | None = None
    """What MFU and MBU are shares of; None: not known."""
    latency: dict[str, Any] | None = None
    """The latency model as data (`perf.latency.corrected`), for a cluster's controller."""
    peer_address: str | None = None
    """Where other instances of the cluster reach this one. None: it computes no spans, and no KV moves."""
    peer_others: tuple[str, ...] = ()
    """Where they reach its other ranks, if the instance is several processes."""


class FatalError(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine cannot start or go on."""

    error: str
    """Fit to be shown to a user."""
    final: bool = True
    """False: a restarted engine process may succeed."""


HEARTBEAT_SUFFIX = "-b"
"""Added to an engine's endpoint: where the server receives its heartbeats."""


def join_endpoints(messages: str, beats: str) -> str:
    """Return one string for the endpoints of messages and of heartbeats."""
    return f"{messages},{beats}"


def split_endpoints(endpoint: str) -> tuple[str, str]:
    """Return the endpoints of messages and of heartbeats: the inverse of `join_endpoints`, or `HEARTBEAT_SUFFIX`."""
    messages, _, beats = endpoint.partition(",")
    return messages, beats or endpoint + HEARTBEAT_SUFFIX


EngineState = Literal["starting", "ready", "recovering", "draining", "lost"]


@runtime_checkable
class SampledEngine(Protocol):
    """An engine, or a cluster of engines, that reports samples of its iterations."""

    def on_samples(self, receive: Callable[[int, EngineSamples], None]) -> None:
        """Call `receive` with an instance's number (0: the only one) and its samples, on the server's event loop."""


class EngineClient(Protocol):
    """The server's interface to an engine or a cluster of engines. Tests pass a double.

    All methods are called on the server's event loop and none blocks it.
    """

    @property
    def state(self) -> EngineState:
        """'recovering' while workers or the engine process are lost and new ones start: accepted requests continue
        afterwards, and new ones wait. 'lost' when restarting was given up: /health reports it."""

    @property
    def info(self) -> EngineInfo:
        """Raises UnavailableError before the engine is ready."""

    @property
    def stats(self) -> EngineStats:
        """The newest statistics received."""

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready. Raises ConfigError with the engine's own message otherwise."""

    def generate(self, submit: SubmitRequest, prompt: bytes | memoryview) -> AsyncIterator[OutputDelta]:
        """Submit and yield deltas until one carries `finish`.

        Raises OverloadedError (queue full) or UnavailableError (draining, lost) at the first step. Closing the
        iterator early aborts the request.
        """

    async def drain(self) -> None:
        """Reject new requests, and return when all accepted ones have finished."""

    async def close(self) -> None:
        """End the engine process. Unfinished requests fail with UnavailableError."""


# An instance that is several processes has an end for each rank; what goes from which rank of one to which of another.
#
# Re-sharding: each rank of the target gets its own KV heads from ranks of the source that have them, directly. Where
# the source has a head several times (fewer KV heads than ranks), its copies take turns; where the target has it
# several times, each copy is sent. No torch.

_APART = 1 << 16
"""Difference between the numbers of two ends of an instance; instances have smaller numbers, and rank 0's end has the
instance's own."""


def end_of(instance: int, rank: int) -> int:
    """Return the number that identifies a rank of an instance among its peers."""
    return instance + rank * _APART


def instance_of(end: int) -> int:
    """Return the instance of an end."""
    return end % _APART


def rank_of(end: int) -> int:
    """Return the rank of an end."""
    return end // _APART


def named(end: int) -> str:
    """An end in words."""
    return f"instance {instance_of(end)}" + (f" (worker {rank_of(end)})" if rank_of(end) else "")


def heads_of(kv_heads: int, ranks: int, rank: int) -> range:
    """The KV heads that a tensor-parallel rank has (`runtime.model.config`)."""
    return range(rank * kv_heads // ranks, ((rank + 1) * kv_heads - 1) // ranks + 1)


@cache
def routes(kv_heads: int, sources: int, targets: int) -> dict[tuple[int, int], range]:
    """Map (source rank, target rank) to the KV heads sent, for instances of so many tensor-parallel ranks.

    Each target rank gets each of its heads once; pairs of ranks that are missing exchange nothing.
    """
    found: dict[tuple[int, int], range] = {}
    for target in range(targets):
        for head in heads_of(kv_heads, targets, target):
            holders = [rank for rank in range(sources) if head in heads_of(kv_heads, sources, rank)]
            # Copies of a head take turns, so that no source rank sends to all targets.
            way = (holders[target % len(holders)], target)
            found[way] = range(found[way].start if way in found else head, head + 1)
    return found


class PeerAddress(msgspec.Struct, frozen=True):
    """How one instance reaches another. `incarnation` grows with each process that takes the number. `address`:
    `unix:PATH` or `tcp:HOST:PORT`; of an instance that is several processes that of rank 0, and `others` of the other
    tensor-parallel ranks, in order."""

    instance: int
    incarnation: int
    address: str
    others: tuple[str, ...] = ()

    def ends(self) -> list[PeerAddress]:
        """Each of its ranks as a peer of its own."""
        return [
            PeerAddress(end_of(self.instance, rank), self.incarnation, address)
            for rank, address in enumerate((self.address, *self.others))
        ]


class PeerLostError(HeadwayError):
    """What was sent or expected will not come: the other instance is gone, or what was between them was cut. `end`: the
    other one, where it is that."""

    def __init__(self, why: str, end: int | None = None) -> None:
        super().__init__(why)
        self.end = end


def endpoint(address: str) -> str:
    """What ZeroMQ calls an address. Raises ConfigError."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if kind == "unix" and rest:
        return f"ipc://{rest}"
    if kind == "tcp" and host and port.isdecimal():
        return f"tcp://{host}:{port}"
    raise ConfigError(f"peer address {address!r}: must be unix:PATH or tcp:HOST:PORT")


# Messages between the controller and an instance, beside those of `runtime.engine.protocol`.
#
# All travel on the engine's one socket; where the instance is several processes, the engine and its ranks use the same
# messages among each other (`runtime.executor.plans`). Requests are identified by an id that the controller makes
# for each attempt, so a late message about an attempt that was given up matches no request. Instances are identified by
# their number in the cluster. Token positions count from the beginning of the prompt. `number`, where a message has it,
# is set between an engine and its ranks only: the request's number in the plan stream, 0 if it has none.


class MeetPeers(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All instances that are there now, the receiver included. Sent whenever that changes.

    Connections to an incarnation that is not listed any more are closed, and waits on them end with PeerLostError.
    """

    peers: tuple[PeerAddress, ...]


class ComputeSpan(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """Compute a span task of a request together with the rest of its group. Sent to all instances of the group."""

    id: str
    index: int
    """Number of the task: of the span in the prompt, or of the token that a group decodes."""
    run: SpanTask
    drawn: tuple[int, ...] = ()
    """Tokens that end with the task's last one, as many as may be unknown here: those drawn by other instances since
    `SubmitRequest`."""
    before: tuple[SpanTask, ...] = ()
    """Tasks computed before this one, in order: the layout of the KV follows from them."""
    last: bool = False
    """Whether the prompt ends with this task: the group's first instance then draws a token."""
    beside: bool = False
    """Whether the scheduler's iterations continue between layers; otherwise they stop until the task ends or pauses."""
    home: int | None = None
    """Instance where a scheduler has left the KV of all tokens before the task, which owns it from now on; `before`
    describes it too."""
    preemptible: bool = False
    """Whether the task can be paused."""
    cached: bool = False
    """Whether `before`, one task of one instance of the group, is not computed: that instance has its tokens in its
    prefix cache."""
    cached_slots: tuple[tuple[int, int], ...] = ()
    """Where that instance's engine has found them, as (first, count): for its span executor, and for its ranks. They
    are other requests': copied."""


class PauseRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop computing a request, to go on here later or elsewhere.

    A span task stops at the next layer edge of the piece that is being computed: sent to the group's first instance,
    and answered by all of the group with `SpanTaskPaused`, or with `SpanTaskDone` where the last layer had begun. A
    decode leaves the scheduler after the token under way: answered by a delta with `staged`, or by the last one
    where the request ends with that token.
    """

    id: str


class ResumeSpan(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Continue a paused span, or a rank's part in it that waits. Sent to all instances of the group."""

    id: str
    slots: tuple[tuple[int, int], ...] = ()
    """To a rank that needs slots of the pool: their ranges, as (first, count)."""


class ReserveKv(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Reserve blocks for the KV of an admitted request. Comes back when they are, in order of request, behind a stats
    snapshot that shows them as used."""

    id: str
    tokens: int
    serial: int = 0
    """An instance that a request has left may get another reservation of it."""
    number: int = 0


class SendKv(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """Send the KV of tokens [start, end) that is here, or will be after the task under way, to instance `to`.

    Layer by layer, as soon as each is computed. Only to an instance that has answered `ReserveKv`.
    """

    id: str
    piece: int
    """Number of the movement, which the receiver's `KvArrived` repeats."""
    start: int
    end: int
    to: int
    number: int = 0
    there: int = 0
    """To a rank: tokens that are there under that number, if any; it may know of more."""


class SpanTaskDone(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A span task is complete on this instance. Times are CLOCK_MONOTONIC."""

    id: str
    index: int
    began_s: float = 0.0
    ended_s: float = 0.0
    cached_tokens: int = 0
    """Tokens before the task that came from a prefix cache (`ComputeSpan.cached`)."""
    saved_s: float = 0.0
    """Seconds that these would have taken alone, on this instance."""
    delta: OutputDelta | None = None
    """From the group's first instance after the last task: the token, with `finish` set where it ends the request."""
    # From a rank, in place of times and delta (`SpanExecutor.finish` and `whole_tokens`).
    emitted: EmittedToken | None = None
    moved: bool = False
    whole: int = 0


class SpanTaskPaused(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """A span task has stopped until `ResumeSpan`. Bytes are those that this instance keeps
    (`runtime.sequence_parallel.prefill`)."""

    id: str
    index: int
    tokens: int = 0
    """Position before which all tokens are complete in all layers."""
    layer: int = 0
    """Number of layers that are complete of the piece after that position."""
    kv_bytes: int = 0
    activation_bytes: int = 0
    kv_bytes_at_end: int = 0
    """KV bytes of the whole task, once it is complete."""
    waits: bool = False
    """From a rank, which is not to pause: it waits for `slots` of the pool (`span_executor.SlotAllocator`), or, with a
    `layer`, carries out batches that the engine has submitted."""
    slots: int = 0
    replace: bool = False


class SpanTaskLost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A task or a transfer cannot be completed here. The controller drops the attempt."""

    id: str
    why: str
    by: int | None = None
    """The instance to which the loss is attributed: one that cannot be reached from here, or this one, where something
    has failed; None: neither."""
    transfer: bool = False
    """Whether it is a transfer: nothing more of the request's KV comes or goes here."""


class KvArrived(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A slice of KV has arrived completely. Sent by the receiver, once per sender."""

    id: str
    piece: int
    source: int
    """The instance that sent it."""
    # CLOCK_MONOTONIC of the first and the last byte.
    began_s: float
    ended_s: float
    whole: bool = False
    """From a rank: its part of all other slices has arrived too."""
    serial: int = 0
    """From a rank: of the `ReserveKv` whose blocks it has filled."""


TransferEnd = KvArrived | SpanTaskLost
"""How a transfer ends at an instance."""

ToInstance = MeetPeers | SubmitRequest | ComputeSpan | PauseRequest | ResumeSpan | ReserveKv | SendKv
FromInstance = SpanTaskDone | SpanTaskPaused | SpanTaskLost | ReserveKv | KvArrived
