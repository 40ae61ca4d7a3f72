"""Predicted times on groups of instances: a chunk's prefill on a ring, a decode over sharded KV, the exchange between
KV groups (KVP), and the points at which a span can be paused.

A group is a ring of `sp` instances over `nodes` nodes; the span's strategy defines how layers are computed on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from headway.core.batch import GroupBatch
from headway.core.request import Strategy, cut
from headway.perf.hardware import AcceleratorSpec, ModelShape, NetworkLink, ParallelLayout, rank_shape
from headway.perf.latency.base import (
    MAX_CHUNK,
    BatchLoad,
    LatencyModel,
    Seconds,
    WrappedLatency,
    beside_prompts,
    load_s,
)
from headway.perf.latency.table import TableSource

LOCAL = Strategy()


class GroupShape(NamedTuple):
    """Size and strategy of a group of instances."""

    sp: int
    """Instances in the group."""
    nodes: int = 1
    """Nodes that they are spread over."""
    strategy: Strategy = LOCAL


class GroupLatency(Protocol):
    """Predicted seconds of a chunk's prefill. Pure: equal arguments give equal results."""

    @property
    def source(self) -> str:
        """Origin of the numbers, in words."""

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        """Return the seconds of `tokens` tokens over `past` cached ones, computed by the whole group together."""

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        """Return the most tokens over `past` whose prefill takes at most `budget_s`; 0 when none does."""


def batch_s(latency: GroupLatency, parts: Iterable[tuple[int, int]], group: GroupShape) -> float:
    """Return the seconds of several prompts' chunks, as (past, tokens), computed as one batch on a group.

    The sum of their times, with the fixed part of a chunk (a single token's time) counted once. Exact for models that
    are a constant plus a sum over tokens, as LoongServe's (§5.5) and Eq. (1) are."""
    times = [latency.prefill_s(past, tokens, group) for past, tokens in parts]
    if len(times) < 2:
        return sum(times)
    # A batch is never faster than its slowest chunk alone, also where the model is no constant plus a sum.
    return max(max(times), sum(times) - (len(times) - 1) * latency.prefill_s(0, 1, group))


# Prefill time of a chunk on a ring of instances, derived from one instance's latency model, for unmeasured groups.
#
# Each instance computes its share of the rows and of causal attention, evenly (`striped`, or zigzag: `ring`; with
# `contiguous` shares all wait for the last one, which attends to nearly all keys). A layer's attention has `sp` steps,
# each the longer of computing a block and of passing a block's KV to the neighbour, and at least `step_s`, the fixed
# cost of a step (Tetris's Table 1 implies 0.75 ms: its Eq. 1 constants are 24 ms an instance over 32 layers). Nothing
# overlaps across layers.
#
# Attention kernels reach less in a ring (`ring_share`): zig-zag ring attention on eight A100 reached 81.7% of eight
# single-GPU FlashAttentions (zhuzilin/ring-flash-attention's table, forward only), so 6.1% a doubling of the ring;
# beyond eight that is an extrapolation. Tetris's Table 1, whose times contain it, implies 2.9% a doubling at 16.

STEP_S = 7.5e-4
"""Least seconds of a ring step in one layer."""


RING_LOSS = 0.061
"""Share of attention's rate that is lost per doubling of the ring."""


def ring_share(members: float, loss: float = RING_LOSS) -> float:
    """Return the share of its rate that attention keeps in a ring of so many members (1: no ring)."""
    # 1 - loss·log2(members) reaches 0 at 2^16 members: keep a tenth
    return max(0.1, 1.0 - loss * math.log2(max(1.0, members)))


class RingLatency:
    """`GroupLatency` over one instance's `LatencyModel` (tp inside it included)."""

    def __init__(
        self,
        instance: LatencyModel,
        shape: ModelShape,
        inside: NetworkLink,
        across: NetworkLink,
        tp: int = 1,
        step_s: float = STEP_S,
        source: str = "",
    ) -> None:
        self._instance, self._shape, self._tp, self._step_s = instance, shape, tp, step_s
        self._inside, self._across = inside, across
        self.source = source or f"derived: one instance's model on a ring, {step_s * 1e3:g} ms a ring step and layer"

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        mine = -(-tokens // group.sp)
        # Beyond the range that models tabulate, rows scale linearly.
        rows = min(mine, 2 * MAX_CHUNK)
        rows_s = self._instance.rows_s(rows) * (mine / rows)
        attention_s = self._instance.attention_s(past, tokens) / group.sp
        if group.strategy.attn == "contiguous" and group.sp > 1:
            attention_s *= _imbalance(past, tokens, group.sp)
        if group.sp == 1:
            return rows_s + attention_s
        layers, shape = self._shape.layers, self._shape
        # Bytes of one instance's share of KV, in one layer and on one tensor-parallel rank's link.
        block = (past + tokens) / group.sp * shape.kv_bytes_per_token / layers / self._tp
        link = self._inside if group.nodes == 1 else self._across
        step_s = max(attention_s / layers / group.sp, link.transfer_s(int(block)), self._step_s)
        return rows_s + layers * group.sp * step_s

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        return largest(lambda tokens: self.prefill_s(past, tokens, group), budget_s)


def _imbalance(past: int, tokens: int, sp: int) -> float:
    """Return the ratio of the last contiguous share's attention to the mean share's."""
    # Mean keys a row: past + tokens - mine/2 in the last share, past + tokens/2 over all.
    mine = tokens / sp
    return (past + tokens - mine / 2) / (past + tokens / 2)


def largest(seconds: Callable[[int], float], budget_s: float) -> int:
    """Return the most tokens, up to 2^24, within a budget (0: none); `seconds` must not fall with tokens."""
    # Invariant: `low` fits (or is 0), `high` does not (or is the limit).
    low, high = 0, (1 << 24) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= budget_s else (low, middle)
    return low


# Points at which a running span can be paused: after each layer of each of its pieces (`core.request.cut`).
#
# A span takes the time predicted for it as a whole, however it is cut into pieces. A piece's part of that time is its
# share of the sum of all pieces' predicted times; all layers of a piece take equally long. Used by the simulator, the
# live controller and policies. A span that is not cut can be paused after each layer (PecSched §5.1).


class PausePoints:
    """Pause points of one span."""

    __slots__ = ("layers", "pieces", "shares")

    def __init__(self, pieces: tuple[tuple[int, int], ...], seconds: Callable[[int, int], float], layers: int) -> None:
        """seconds: predicted time of tokens [start, end) alone; called only if there are several pieces."""
        # Tokens [start, end) of each piece; pieces are computed one after another, each through all layers.
        self.pieces = pieces
        self.layers = layers
        # Each piece's share of the span's time; they sum to 1.
        self.shares: tuple[float, ...] = (1.0,)
        if len(pieces) > 1:
            alone_s = [seconds(start, end) for start, end in pieces]
            total_s = sum(alone_s)
            self.shares = tuple(one_s / total_s if total_s > 0 else 1.0 / len(pieces) for one_s in alone_s)

    @property
    def widest_gap(self) -> float:
        """The largest share of the span's time between two neighbouring pause points."""
        return max(self.shares) / self.layers

    def elapsed_share(self, tokens: int, layer: int) -> float:
        """Return the share of the span's time before `layer` of the piece that begins at token `tokens`. Raises
        ValueError if no piece begins there."""
        before = 0.0
        for (start, _), share in zip(self.pieces, self.shares, strict=True):
            if start == tokens:
                return before + share * layer / self.layers
            before += share
        raise ValueError(f"no piece of {self.pieces} begins at {tokens}")

    def next_point(self, tokens: int, layer: int, seconds: float, whole_s: float) -> tuple[float, int, int]:
        """Return the first pause point at least `seconds` after the one at (tokens, layer).

        The result is (seconds until it, first token of its piece, layer). whole_s: time of the whole span. The point
        after the last layer of a piece is the start of the next piece; of the last piece it is the end of the span.
        Raises ValueError if no piece begins at `tokens`."""
        passed_s, last = 0.0, len(self.pieces) - 1
        for number, ((start, _), share) in enumerate(zip(self.pieces, self.shares, strict=True)):
            if start < tokens:
                continue
            layer_s = whole_s * share / self.layers
            begun = layer if start == tokens else 0
            # Whole layers of this piece until then; 1e-9 keeps a time exactly at a layer's end from rounding up.
            done = math.ceil((seconds - passed_s) / layer_s - 1e-9) if layer_s > 0 else 0
            # At the last layer's end of a piece that is not the last, go on: that point is layer 0 of the next piece.
            if begun + done < self.layers or number == last:
                at = min(self.layers, begun + max(0, done))
                return passed_s + (at - begun) * layer_s, start, at
            passed_s += (self.layers - begun) * layer_s
        raise ValueError(f"no piece of {self.pieces} begins at {tokens}")


def pause_points_of(
    latency: GroupLatency, start: int, end: int, group: GroupShape, rows: int, layers: int
) -> PausePoints:
    """Return the pause points of tokens [start, end) on a group.

    rows: most rows that an instance computes at once; 0: all."""
    pieces = cut(start, end, group.sp, rows)
    return PausePoints(pieces, lambda a, b: latency.prefill_s(a, b - a, group), layers)


# Cost of exchanging queries and partial outputs between groups that hold shards of one request's KV (KVP).
#
# Medha §3.3: in every layer the query is replicated to every group that holds a shard, and partial outputs are merged
# by log-sum-exp. Each row goes to each remote group once a layer; fp32 partial outputs and log-sum-exps return.


class ShardExchangeCost(NamedTuple):
    """Cost of one pipeline stage's exchanges. Zeros: unknown, or free."""

    fixed_s: float = 0.0
    """Seconds of each iteration with any exchange."""
    row_s: float = 0.0
    """Seconds of each row and remote group."""

    def seconds(self, rows: int) -> float:
        """Return the seconds of an iteration. rows: exchanged rows, each counted once for every remote group."""
        return self.fixed_s + self.row_s * rows if rows else 0.0


def between_groups(device: AcceleratorSpec, shape: ModelShape, layout: ParallelLayout) -> ShardExchangeCost:
    """Return the exchange cost of a layout.

    Each tensor-parallel rank exchanges its own heads with its peer in the other group, over the node's own link while
    all groups fit into one node, else over the network."""
    rank = rank_shape(shape, layout, 0)
    inside = layout.accelerators <= device.per_node
    link = layout.inside_link(device) if inside else layout.across_link(device)
    width = rank.q_width
    # A row's query in the model's type out; its partial output and one log-sum-exp a head back, in fp32.
    row_bytes = width * rank.dtype_bytes + (width + rank.q_heads) * 4
    return ShardExchangeCost(
        fixed_s=2 * rank.layers * link.latency_s,
        row_s=rank.layers * row_bytes / (link.bytes_per_s * link.efficiency),
    )


def exchange_of(source: TableSource) -> ShardExchangeCost:
    """Return the exchange cost that a table contains; free where it was not measured."""
    return ShardExchangeCost(*(source.exchange or ()))


class WithExchange(WrappedLatency):
    """Model whose chunks also pay `row_s` per row, to size chunks of a request with shards in other groups."""

    def __init__(self, base: LatencyModel, row_s: float) -> None:
        super().__init__(base)
        self.row_s = row_s

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        rows = np.arange(first, last + 1, dtype=np.float64)
        return np.asarray(self.base.chunk_s(past, first, last) + self.row_s * rows, dtype=np.float64)

    def attention_s(self, past: int, tokens: int) -> float:
        return self.base.attention_s(past, tokens) + self.row_s * tokens

    def least_attention_s(self, past: int, tokens: int) -> float:
        return self.base.least_attention_s(past, tokens) + self.row_s * tokens


class ShardedModel(WrappedLatency):
    """Model of a request whose KV is sharded over groups: no group reads more than `limit` cached tokens of it."""

    def __init__(self, base: LatencyModel, limit: int) -> None:
        super().__init__(base)
        self.limit = limit

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        return self.base.chunk_s(min(past, self.limit), first, last)

    def attention_s(self, past: int, tokens: int) -> float:
        return self.base.attention_s(min(past, self.limit), tokens)

    def least_attention_s(self, past: int, tokens: int) -> float:
        return self.base.least_attention_s(min(past, self.limit), tokens)


# Decode latency on a group of instances that each hold a share of every request's KV.
#
# Every member reads the weights, and all read their KV shares at once; in every layer the query goes out and partial
# outputs return and are merged by log-sum-exp (PecSched Fig. 7, Medha §3.3): two messages whose bytes are negligible.
#
# With several masters (LoongServe §4.2) each master computes the linear layers of its share of the requests and stores
# their new KV; a single master computes those of all requests.


class ShardedDecode(LatencyModel):
    """`LatencyModel` of a group that decodes together, from the model of one member."""

    def __init__(self, member: LatencyModel, members: int, layers: int, link: NetworkLink, masters: int = 1) -> None:
        """link: the slowest one between members."""
        self._member, self._members, self._masters = member, members, masters
        self._exchange_s = 2 * layers * link.latency_s if members > 1 else 0.0

    def token_s(self, first: int, last: int) -> Seconds:
        if self._masters == 1:
            return self._member.token_s(first, last)
        # Rows of the fullest master, which sets the time; the member's table is read once for all shares.
        shares = -(-np.arange(first, last + 1) // self._masters)
        seconds: Seconds = self._member.token_s(int(shares[0]), int(shares[-1]))[shares - shares[0]]
        return seconds

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        """See LatencyModel. (The first iteration of a decode is a chunk of one token.)"""
        return self._member.chunk_s(past // self._members, first, last) + self._exchange_s

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return self._member.decode_s(decodes, -(-kv_sum // self._members)) + self._exchange_s

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """Ignore the measurement: this model does not learn."""


FREE = ShardExchangeCost()


def assist_s(model: LatencyModel, tokens: int, rows: int) -> float:
    """Return the attention seconds of `rows` rows over a shard of `tokens` cached tokens."""
    # A chunk over the shard, less the chunk's attention within itself.
    return max(0.0, model.attention_s(tokens, rows) - model.attention_s(0, rows))


def part_load(model: LatencyModel, part: GroupBatch) -> BatchLoad:
    """Return the load of a part's own decodes and chunks, without its assists."""
    decodes = part.decodes
    count = len(decodes.members)
    load = BatchLoad(count, count, decodes.kv_sum)
    for chunk in part.prefills:
        # Cached tokens in this group only: those before `base` lie in other groups.
        past = chunk.start - chunk.base
        load = load.with_chunk(chunk.tokens, beside_prompts(model, load).attention_s(past, chunk.tokens), past)
    return load


def batch_loads(
    model: LatencyModel, parts: Sequence[GroupBatch], exchange: ShardExchangeCost = FREE
) -> list[BatchLoad]:
    """Return one load per part.

    An assisting part also attends rows of other groups' requests (a decode's row as a decode); both sides of an
    exchange pay its cost."""
    loads = [part_load(model, part) for part in parts]
    if len(parts) == 1:
        return loads
    chunked = {chunk.request for part in parts for chunk in part.prefills}
    # Rows that each group sends or receives, counted once per remote group.
    crossing = dict.fromkeys((part.group for part in parts), 0)
    for i, part in enumerate(parts):
        for assist in part.assists:
            crossing[part.group] += assist.rows
            crossing[assist.owner] += assist.rows
            load = loads[i]
            if assist.request in chunked:
                loads[i] = load.with_chunk(0, assist_s(model, assist.tokens, assist.rows))
            else:
                loads[i] = BatchLoad(load.tokens, load.decodes + 1, load.decode_kv + assist.tokens, load.chunk_s)
    return [load.with_chunk(0, exchange.seconds(crossing[part.group])) for load, part in zip(loads, parts, strict=True)]


def parts_s(model: LatencyModel, parts: Sequence[GroupBatch], exchange: ShardExchangeCost = FREE) -> float:
    """Return the seconds of a batch: those of its slowest part."""
    return max(load_s(model, load) for load in batch_loads(model, parts, exchange))
