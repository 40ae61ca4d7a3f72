"""What the engine and its ranks say to each other: msgspec arrays, never pickle. No torch.

Requests are numbers here, given out by the engine in order of admission: a plan never carries an id of the outside.
"""

from __future__ import annotations

import msgspec

from headway.core.sampling import SamplingParams, TokenLogprobs

PROTOCOL = 4
"""Raised with every change of these messages; a rank of another number is refused."""

BEAT = b"beat-"
"""What the identity of the connection begins with over which a rank's beats come; its number follows."""

ASIDE = b"aside-"
"""The same of the connection over which it says what does not wait for what it computes."""


class RankHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A rank's first word. `store_port`: where rank 0 keeps the rendezvous store, 0 from others."""

    protocol: int
    version: str
    rank: int
    pid: int
    store_port: int = 0


class RankWelcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """All ranks have come: join the others at the store, and load."""

    store_port: int


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The rank has its weights and its KV pool. `mark` is the checkpoint's fingerprint, which all must share.
    peer_address: where it hears other instances, if it does."""

    mark: str
    dtype: str
    threads: int
    weights_bytes: int
    kv_bytes: int
    peer_address: str | None = None


class RankFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The rank cannot start or go on. `ours` false: the error's words are made for a user."""

    error: str
    ours: bool = False


class AdmitToRank(msgspec.Struct, frozen=True, array_like=True, tag="admit"):
    """A new request. Ranks that embed or sample get `params`; if `has_prompt`, the token ids follow as the next frame.

    `output` is what it has generated already, when a new incarnation of the ranks takes it on.
    """

    request: int
    prompt_tokens: int
    params: SamplingParams | None = None
    has_prompt: bool = False
    output: tuple[int, ...] = ()


class BatchPlan(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """One batch for one group: what has changed since the plan before, and nothing that grows with a context.

    forget: requests that have ended. ops: (request, blocks, first token held here), in order, 0 blocks for free. The
    decodes are group `epoch`, which is group `base` without `left` and with `joined` at its end (0: nobody). chunks:
    (request, start, tokens, last, first token held here). `said` is the rolling checksum of all plans up to this one,
    `check` that of the states they led to.

    Between KV groups: assists are `core.batch.Assist`s; asks: (guest group, requests), whose rows go there, in the
    order of the guest's assists; told: (request, tokens known before, tokens), generated in other groups, for a request
    that this group begins to hold. What it knows of them already is passed over.
    """

    seq: int
    forget: tuple[int, ...]
    ops: tuple[tuple[int, int, int], ...]
    epoch: int
    base: int
    joined: tuple[int, ...]
    left: tuple[int, ...]
    chunks: tuple[tuple[int, int, int, bool, int], ...]
    said: int = 0
    check: int = 0
    assists: tuple[tuple[int, int, int, int, int], ...] = ()
    asks: tuple[tuple[int, tuple[int, ...]], ...] = ()
    told: tuple[tuple[int, int, tuple[int, ...]], ...] = ()


class PlanDone(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """A rank has carried out plan `seq`, computing from `start_s` to `end_s` (CLOCK_MONOTONIC of its host).

    tokens: what was drawn, decodes first, then finished prompts; only from the rank that samples. logprobs: likewise,
    empty when nobody asked.
    """

    seq: int
    start_s: float
    end_s: float
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()


class PlanDesync(msgspec.Struct, frozen=True, array_like=True, tag="desync"):
    """The rank has stopped before plan `seq`, having carried out all up to `done`: `why`. It waits for a snapshot."""

    seq: int
    done: int
    why: str


class GroupSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """The state of a group after plan `seq`, to start over from; the plans that follow it are sent again.

    requests: (request, tokens known to the group, runs of blocks, first token held). groups: (epoch, members), as many
    as are kept.
    """

    seq: int
    said: int
    check: int
    requests: tuple[tuple[int, int, tuple[tuple[int, int], ...], int], ...]
    groups: tuple[tuple[int, tuple[int, ...]], ...]


class RankProbe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Nothing was heard for a while: are you there, and have you got all plans up to `seq`?"""

    seq: int


class RankAlive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """Yes; the last plan carried out is `done`. A rank that computes answers when it has finished its plan."""

    done: int


class MeasureRequest(msgspec.Struct, frozen=True, array_like=True, tag="measure"):
    """Time something while no request is there: chunk (tokens, past), decodes (count, past), forward (rows), or, by two
    ranks at the same time, ask (rows, guest group) and visit (rows, owner's group)."""

    kind: str
    first: int
    second: int
    repeats: int


class MeasureResult(msgspec.Struct, frozen=True, array_like=True, tag="measured"):
    """Seconds, the least of the repeats."""

    seconds: float


class ControlMessage(msgspec.Struct, frozen=True, array_like=True, tag="aside"):
    """For whoever moves KV to and from other instances here (`runtime.kv_transfer.rank_transfer`), once plan `after`
    has been carried out;
    before the next one."""

    after: int
    body: bytes


class ControlReply(msgspec.Struct, frozen=True, array_like=True, tag="word"):
    """From whoever moves KV (`runtime.kv_transfer.rank_transfer`)."""

    body: bytes


class StopRank(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End, without finishing anything."""


ToRank = RankWelcome | AdmitToRank | BatchPlan | GroupSnapshot | RankProbe | MeasureRequest | ControlMessage | StopRank
FromRank = RankHello | RankReady | RankFailed | PlanDone | PlanDesync | RankAlive | MeasureResult | ControlReply
