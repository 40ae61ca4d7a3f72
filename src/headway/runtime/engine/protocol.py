"""What the server and the engine say to each other, and the seam between them.

The server process never imports torch; the engine process never sees HTTP. They exchange the messages below
(msgspec over ZeroMQ). A prompt crosses once, as one binary frame of little-endian int32, beside the message that
announces it; nothing that follows is proportional to its length.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import msgspec

from headway.core.request import Slo
from headway.core.sampling import SamplingParams, TokenLogprobs
from headway.core.span import Phase

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A new request. The prompt's token ids follow as the next frame (int32, little-endian).

    received_s is `time.monotonic()` when the server had read the request: queueing counts from there. `again`: it was
    accepted before, by an engine that is gone, and `output` is what the client has been told: no limit of a queue
    refuses it, and its answer goes on from there.

    phase: "prefill" ends with the first token and keeps the KV (`cluster_messages.Staged`), unless that token ends the
    request. "decode": KV of all tokens but the last, `output` included, is in custody under the id; no limit of a queue
    refuses it either.
    """

    id: str
    prompt_tokens: int
    params: SamplingParams
    received_s: float
    slo: Slo = Slo()
    priority: int = 0
    timeout_s: float | None = None
    again: bool = False
    output: tuple[int, ...] = ()
    phase: Phase = "all"


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """The client is gone, or a stop string matched: free the request's work at the next chunk edge."""

    id: str


class DrainEngine(msgspec.Struct, frozen=True, tag=True):
    """Finish what was accepted, take nothing new, then end. Sent on SIGTERM."""


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration produced for one request: usually one token; the last one carries `finish`.

    emitted_s: `time.monotonic()` at the engine when the iteration was complete (system-wide on Linux, so that the
    server may subtract). stop_token: the end token that finished the request (it is not in `tokens`). With
    `finish == "error"`, `error` says why and `param` which field was at fault (None: not the request's fault).
    """

    id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    emitted_s: float = 0.0
    error: str | None = None
    param: str | None = None
    first_scheduled_s: float | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the engine, sent with outputs at most every 0.1 s and when idle begins. Counters never fall.

    in_flight: batches under way. stage_busy_s: (group, stage, seconds that it computed). recovering: workers are gone
    and new ones start. lost_tokens_total: what was in the KV of those that were lost, and is computed again.
    run_tokens_total: those of the prefill tokens that were no scheduler's but this instance's share of runs.
    engine_restarts_total is the server's own count.
    """

    running: int = 0
    waiting: int = 0
    in_flight: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    prefill_tokens_total: int = 0
    run_tokens_total: int = 0
    decode_tokens_total: int = 0
    iterations_total: int = 0
    preemptions_total: int = 0
    recomputed_tokens_total: int = 0
    busy_s_total: float = 0.0
    schedule_s_total: float = 0.0
    predicted_s_total: float = 0.0
    last_chunk_tokens: int = 0
    last_iteration_s: float = 0.0
    stage_busy_s: tuple[tuple[int, int, float], ...] = ()
    recoveries_total: int = 0
    lost_tokens_total: int = 0
    recovery_s_total: float = 0.0
    recovering: bool = False
    engine_restarts_total: int = 0


class IterationOutputs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything that one iteration produced, in one message."""

    deltas: tuple[OutputDelta, ...] = ()
    stats: EngineStats | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent once, when the engine is ready to serve. latency: its model as data (`perf.latency.recorded`), for a router.
    peer_address: where other instances of its cluster reach it; None: it takes no part in runs, and no KV moves.
    peer_others: of one that is several processes, where they reach its other ranks."""

    model: str
    architecture: str
    dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    kv_tokens_total: int
    kv_block_tokens: int
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
    latency: dict[str, Any] | None = None
    peer_address: str | None = None
    peer_others: tuple[str, ...] = ()


class FatalError(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start or go on; the message is fit to be shown to a user. `final` false: another engine process
    may fare better."""

    error: str
    final: bool = True


BEATS = "-b"
"""What is added to the endpoint to have the one at which the server hears the engine's beats."""


def doors(messages: str, beats: str) -> str:
    """One word for two endpoints of which the second does not follow from the first."""
    return f"{messages},{beats}"


def both(endpoint: str) -> tuple[str, str]:
    """Where messages go, and where beats do."""
    messages, _, beats = endpoint.partition(",")
    return messages, beats or endpoint + BEATS


EngineState = Literal["starting", "ready", "recovering", "draining", "lost"]


class EngineClient(Protocol):
    """The server's only way to the engine. The live one speaks ZeroMQ; tests pass a double.

    All methods are called on the server's event loop and none blocks it.
    """

    @property
    def state(self) -> EngineState:
        """'recovering' while workers or the engine process are lost and new ones start: what was accepted goes on, and
        new requests wait. 'lost' when that was given up: /health then says so."""

    @property
    def info(self) -> EngineInfo:
        """Raises UnavailableError before the engine is ready."""

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot."""

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready; raises ConfigError with the engine's own words otherwise."""

    def generate(self, submit: SubmitRequest, prompt: bytes | memoryview) -> AsyncIterator[OutputDelta]:
        """Submit and yield deltas until one carries `finish`.

        Raises OverloadedError (queue full) or UnavailableError (draining, lost) at the first step. Closing the
        iterator early aborts the request.
        """

    async def drain(self) -> None:
        """Take nothing new, and return when everything accepted has finished."""

    async def close(self) -> None:
        """End the engine process, whatever it is doing."""
