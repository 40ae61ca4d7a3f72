"""Counters of one simulated engine over a run."""

from __future__ import annotations

from headway.core.batch import Batch, Chunk, KvOp
from headway.sim.prefix_cache import PrefixCacheUse
from headway.sim.result import GroupJoin, ReplicaUse


class ReplicaCounters:
    """What `ReplicaUse` reports, counted when batches begin."""

    __slots__ = (
        "batches", "busy_s", "decoded", "iterations", "joins", "kv_peak", "kv_read", "more_passes", "pairs",
        "preemptions", "prefill", "recomputed", "scheduling_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.batches = self.iterations = self.prefill = self.decoded = self.kv_read = 0
        self.preemptions = self.recomputed = self.kv_peak = self.more_passes = 0
        self.joins: list[GroupJoin] = []
        self.pairs = self.busy_s = self.scheduling_s = 0.0

    def chunk(self, chunk: Chunk) -> None:
        """Count a chunk's tokens and attention."""
        self.prefill += chunk.tokens
        self.kv_read += chunk.start + chunk.tokens
        # token i of the chunk attends to start + i + 1 tokens; the sum over the chunk
        self.pairs += chunk.tokens * (chunk.start + 0.5 * (chunk.tokens + 1))

    def decodes(self, batch: Batch, repeats: int) -> None:
        """Count the decodes of a batch; each repetition reads one more KV token for every one."""
        for part in batch.parts:
            count = len(part.decodes.members)
            self.decoded += repeats * count
            read = repeats * part.decodes.kv_sum + count * (repeats * (repeats - 1) // 2)
            self.kv_read += read
            self.pairs += read

    def join(self, now: float, replica: int, group: int, op: KvOp) -> None:
        """Count a group that joins a request with a shard, which `op` reserves."""
        # the first shard, from token 0, is no join: hence + 2
        earlier = {join.start for join in self.joins if join.request == op.request and join.start < op.start}
        self.joins.append(GroupJoin(now, replica, op.request, group, op.start, len(earlier) + 2))

    def remote_attention(self, batch: Batch, repeats: int) -> None:
        """Count KV read for decodes of other groups, and their forward passes; chunks are counted with all of it."""
        self.more_passes += repeats * (sum(part.tokens > 0 for part in batch.parts) - 1)
        chunked = {chunk.request for part in batch.parts for chunk in part.prefills}
        read = sum(a.tokens for part in batch.parts for a in part.assists if a.request not in chunked)
        self.kv_read += repeats * read
        self.pairs += repeats * read

    def use(self, over_s: float, prefix_cache: PrefixCacheUse | None) -> ReplicaUse:
        """Return the counters; `over_s`: seconds counted as busy that lie beyond the run."""
        return ReplicaUse(
            iterations=self.iterations,
            batches=self.batches,
            busy_s=max(0.0, self.busy_s - over_s),
            prefill_tokens=self.prefill,
            decode_tokens=self.decoded,
            kv_read_tokens=self.kv_read,
            attention_pairs=self.pairs,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed,
            kv_peak_tokens=self.kv_peak,
            scheduling_s=self.scheduling_s,
            more_passes=self.more_passes,
            joins=tuple(self.joins),
            prefix_cache=prefix_cache,
        )
