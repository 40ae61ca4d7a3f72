"""Cost of exchanging queries and partial outputs between groups that hold shards of one request's KV (KVP).

Medha §3.3: in every layer the query is replicated to every group that holds a shard, and partial outputs are merged by
log-sum-exp. Each row goes to each remote group once a layer; fp32 partial outputs and log-sum-exps return.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.perf.hardware.accelerators import AcceleratorSpec
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.base import BatchLoad, LatencyModel, Seconds
from headway.perf.latency.layout import ParallelLayout, cut
from headway.perf.latency.table_latency import TableSource


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
    rank = cut(shape, layout, 0)
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


class WithExchange(LatencyModel):
    """Model whose chunks also pay `row_s` per row, to size chunks of a request with shards in other groups."""

    def __init__(self, base: LatencyModel, row_s: float) -> None:
        self.base, self.row_s = base, row_s

    def token_s(self, first: int, last: int) -> Seconds:
        return self.base.token_s(first, last)

    def rows_s(self, rows: int) -> float:
        return self.base.rows_s(rows)

    def least_rows_s(self, rows: int) -> float:
        return self.base.least_rows_s(rows)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        rows = np.arange(first, last + 1, dtype=np.float64)
        return np.asarray(self.base.chunk_s(past, first, last) + self.row_s * rows, dtype=np.float64)

    def attention_s(self, past: int, tokens: int) -> float:
        return self.base.attention_s(past, tokens) + self.row_s * tokens

    def least_attention_s(self, past: int, tokens: int) -> float:
        return self.base.least_attention_s(past, tokens) + self.row_s * tokens

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return self.base.decode_s(decodes, kv_sum)

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        self.base.observe(load, measured_s)


class ShardedModel(LatencyModel):
    """Model of a request whose KV is sharded over groups: no group reads more than `limit` cached tokens of it."""

    def __init__(self, base: LatencyModel, limit: int) -> None:
        self.base, self.limit = base, limit

    def token_s(self, first: int, last: int) -> Seconds:
        return self.base.token_s(first, last)

    def rows_s(self, rows: int) -> float:
        return self.base.rows_s(rows)

    def least_rows_s(self, rows: int) -> float:
        return self.base.least_rows_s(rows)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        return self.base.chunk_s(min(past, self.limit), first, last)

    def attention_s(self, past: int, tokens: int) -> float:
        return self.base.attention_s(min(past, self.limit), tokens)

    def least_attention_s(self, past: int, tokens: int) -> float:
        return self.base.least_attention_s(min(past, self.limit), tokens)

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return self.base.decode_s(decodes, kv_sum)

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        self.base.observe(load, measured_s)
