"""A request as policies see it: its length, class and targets, spans of its tokens with the instances that compute
them, sampling settings, and the events that a scheduler reports about it. Everything here is immutable; how far a
request has come is the scheduler's state, and what its tokens are is the engine's.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

BACKGROUND_PRIORITY: Final = 2**63 - 1
"""Priority of requests that no client waits for, such as prepared documents: after all others."""


class Slo(msgspec.Struct, frozen=True):
    """Latency targets of a request. None: the policy's own default applies."""

    ttft_s: float | None = None
    """Seconds from arrival to the first output token."""
    tbt_s: float | None = None
    """Seconds between two output tokens."""
    refuse_late: bool = False
    """Refuse the request on arrival if its first token is predicted to be later than `ttft_s`."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts and latency targets of one request."""

    id: str
    arrival_s: float
    """On the scheduler's clock, live or virtual."""
    prompt_tokens: int
    max_output_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt that need no work (prefix reuse, or KV that was transferred)."""
    slo: Slo = Slo()
    priority: int = 0
    """Lower goes first, as in vLLM; it orders before the policy's own key."""


# Ranges of a request's tokens and the instances that compute them.
#
# Medha, Tetris and PecSched share this type (docs/architecture.md).
#
# A request is a list of spans; a span is a range of its tokens, placed on a group of instances, with a parallel
# strategy. On a single instance a whole request is one span.

AttentionStrategy = Literal["local", "ring", "striped", "contiguous", "ulysses", "megatron"]
"""`ring` gives each instance two ranges of tokens, one from each end (zigzag), `striped` every n-th token: either way
all have the same causal attention to compute. `contiguous` gives each one range (the first rings): all wait for the
last instance, which has nearly twice the mean."""
MlpStrategy = Literal["local", "ulysses", "megatron"]


Phase = Literal["all", "prefill", "decode"]
"""Part of a request that a scheduler computes: all; its prefill only, whose KV is then staged; its decode only, with
KV that has been transferred."""


def cut(start: int, end: int, members: int, rows: int) -> tuple[tuple[int, int], ...]:
    """Tokens [start, end) as pieces that a group of so many members computes one after the other, each through all
    layers: at most `rows` rows of a member at once (two at least), as equal as can be. 0 rows: all at once.

    All pieces but the last are multiples of twice the members: each member then gets as many tokens of a piece as any
    other in every placement order (zigzag has two runs of each), and KV of earlier pieces has no cause to move."""
    unit = 2 * members
    most = max(unit, rows * members // unit * unit) if rows else end - start
    if end - start <= most:
        return ((start, end),)
    # Fewest pieces of at most `most` tokens, then equal sizes rounded up to whole units.
    count = -(-(end - start) // most)
    size = -(-(end - start) // (count * unit)) * unit
    return tuple((at, min(at + size, end)) for at in range(start, end, size))


class Strategy(msgspec.Struct, frozen=True):
    """How a span's layers are spread over its group."""

    attn: AttentionStrategy = "local"
    mlp: MlpStrategy = "local"


class SpanTask(msgspec.Struct, frozen=True):
    """Tokens [start, end) of a request as live instances compute them: what `runtime.sequence_parallel.ChunkSpec`
    needs. Every instance of the group, and any that joins later, derives from it where the KV lies."""

    start: int
    end: int
    group: tuple[int, ...]
    """Instances, in order."""
    strategy: Strategy = Strategy()
    node: int | None = None
    """How many of the group make a node; None: all."""
    in_place: bool = False
    """KV of earlier tasks stays where it lies, unless its heads are cut otherwise than this task's; its own goes to the
    first of the group (of Ulysses: of the node). The whole group decodes so, one token a task."""
    rows: int = 0
    """The group computes it piece by piece, with at most so many rows of an instance at once (`cut`); 0: at once."""
    keepers: tuple[int, ...] = ()
    """For a task in place: members of the group that keep KV; the others send theirs to them. (): all keep it."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a request on the instances of `group`."""

    request: Request
    start: int
    end: int
    group: tuple[int, ...] = (0,)
    """Instances, in order."""
    strategy: Strategy = Strategy()

    @classmethod
    def whole(cls, request: Request, instance: int = 0) -> Span:
        """The span of a request that lives on one instance: all of its prompt that is not cached."""
        return cls(request=request, start=request.cached_tokens, end=request.prompt_tokens, group=(instance,))


class RequestEvent(msgspec.Struct, frozen=True, gc=False):
    """Change of one request's state."""

    kind: Literal["started", "finished", "aborted", "preempted", "staged"]
    """started: its first chunk has been computed. finished: all output is there. aborted: freed before its end.
    preempted: its KV was freed and must be computed again. staged: it left the scheduler and its KV is kept, for a
    transfer or for its next phase."""
    request: str
    at_s: float
    tokens: int = 0
    """preempted: tokens to compute again. staged: tokens of KV that are kept."""


# How the next token is drawn. Built by the server from the request body, used by the model's sampler.


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling settings, validated by the server. Stop *strings* are handled by the detokeniser.

    Draws come from a counter generator keyed by (seed, position): a request that is computed again continues the same
    stream.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    """1: off."""
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    """0: off."""
    seed: int | None = None
    """None: the server draws one."""
    seed_drawn: bool = False
    """Whether the server has drawn the seed, so that other engines may draw their own."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """Number of most likely alternatives to report, 0..20; None: off."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report for each token of the prompt; None: off. The whole prompt must then be computed:
    KV of a reused prefix has no logits. Single-process engines only."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, besides the model's own end tokens."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of the drawn token, and of the most likely ones, under the model's own distribution.

    Natural logarithm, before temperature, penalties and truncation (the convention of the OpenAI API).
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability) of the most likely tokens."""
