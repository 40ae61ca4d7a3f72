"""Messages between the server process and the engine process, and the server's interface to the engine.

The server process never imports torch; the engine process never handles HTTP. They exchange the messages below
(msgspec over ZeroMQ). A prompt is sent once, as one binary frame of little-endian int32 behind the message that
announces it; no later message grows with its length.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from headway.core.request import Slo
from headway.core.sampling import SamplingParams, TokenLogprobs
from headway.core.span import Phase
from headway.perf.hardware.utilisation import UtilisationBase

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
    """Of a request with `pin`: how many of its tokens have been computed; all of them once it is pinned."""
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
    """Tokens whose KV attention read, and pairs of query and key, as `perf.hardware.utilisation.AttentionWork`; work on
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
    """What made it no larger (`sim.replayed_run.ChunkLimit`)."""


class IterationSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One iteration on one stage of one KV group, or several in a row as one. Seconds of the engine's clock."""

    group: int
    stage: int
    decided_s: float
    start_s: float
    end_s: float
    predicted_s: float
    """Of all its iterations."""
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
    """Of an instance of a cluster, for placements."""


class EngineInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """Sent once, when the engine is ready to serve."""

    model: str
    architecture: str
    dtype: str
    device: str
    max_model_len: int
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
    """The latency model as data (`perf.latency.recorded`), for a cluster's controller."""
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
