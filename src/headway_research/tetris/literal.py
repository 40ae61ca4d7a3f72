"""Tetris §5.1, Algorithms 1-3 as they are printed: the reference for the fast planner in `cdsp`.

Queues are relative times, pools are copied and updated by Eq. (2), and every size pair is tried. Where the paper is
silent: SP sizes ascend; the improvement rate compares with the best so far; a chunk that takes the whole rest is a
complete plan (Algorithm 1 would call itself with nothing left, and pay one more constant); a chunk is illegal when it
has no tokens or would be no slower on the next smaller size ("too short to yield benefits"); where no node can hold a
remainder alone, the shortest queues anywhere are taken; ties go to lower ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.policy.placement.cdsp import ChunkAllocation, ChunkPlan

Pool = Mapping[int, float]
"""Queuing seconds T_i of each instance, by id."""


class LiteralPlanner:
    """Tetris's Algorithms 1-3 for one pool of instances."""

    def __init__(self, latency: GroupLatency, sizes: Sequence[int], node_of: Sequence[int], rate: float) -> None:
        """sizes: SP size candidates. node_of: each instance's node. rate: the improvement that a larger size must
        bring;
        may be changed between plans."""
        self._latency, self._nodes, self.rate = latency, list(node_of), rate
        self.sizes = tuple(sorted(s for s in sizes if s <= len(self._nodes)))

    def plan(self, tokens: int, pool: Pool, cached: int = 0) -> ChunkAllocation:
        """Return the allocation of a new request with `tokens` uncached tokens after `cached` ones."""
        return self._schedule(tokens, (), 0.0, cached, self.sizes, pool)

    # -- Algorithm 1 ------------------------------------------------------------------------------------------------

    def _schedule(
        self, left: int, before: tuple[ChunkPlan, ...], elapsed_s: float, past: int, sizes: Sequence[int], pool: Pool
    ) -> ChunkAllocation:
        """Return the best plan that begins with the chunks `before`; `elapsed_s` and `past` are their time and
        tokens."""
        group, alone_s = self._single_chunk(left, before, past, sizes, pool)
        best = ChunkAllocation((*before, ChunkPlan(left, group)), elapsed_s + alone_s)
        # chunks stay inside the group of the single-chunk plan, on its size or smaller ones (lines 5-21)
        smaller = [s for s in sizes if s <= len(group)]
        inside = {i: pool[i] for i in group}
        for i, current in enumerate(smaller):
            for following in smaller[i + 1 :]:
                tokens, mine, queue_s = self._chunk_plan(left, before, past, current, following, inside)
                if self._illegal(tokens, past, current):
                    continue
                took_s = queue_s + self._prefill_s(current, past, tokens)
                chunks = (*before, ChunkPlan(tokens, mine))
                if tokens == left:
                    found = ChunkAllocation(chunks, elapsed_s + took_s)
                else:
                    updated = {k: max(0.0, t - took_s) for k, t in inside.items()}  # Eq. (2)
                    # sizes never shrink from chunk to chunk: KV stays where it is
                    rest = [s for s in smaller if s >= following]
                    found = self._schedule(left - tokens, chunks, elapsed_s + took_s, past + tokens, rest, updated)
                if found.ttft_s < best.ttft_s:
                    best = found
        return best

    def _illegal(self, tokens: int, past: int, size: int) -> bool:
        """Return whether a chunk is empty, or no faster than on the next smaller size."""
        if tokens <= 0:
            return True
        at = self.sizes.index(size)
        if at == 0:
            return False
        return self._prefill_s(size, past, tokens) >= self._prefill_s(self.sizes[at - 1], past, tokens)

    # -- Algorithm 2 ------------------------------------------------------------------------------------------------

    def _single_chunk(
        self, left: int, before: tuple[ChunkPlan, ...], past: int, sizes: Sequence[int], pool: Pool
    ) -> tuple[tuple[int, ...], float]:
        """Return the group for all that is left as one chunk, and its time to first token."""
        initial = before[-1].group if before else ()
        best_s, best = float("inf"), initial
        for size in sizes:
            group = self.get_group(pool, initial, size)
            ttft_s = max(pool[i] for i in group) + self._prefill_s(size, past, left)
            # a larger size must improve on the best so far by the rate
            if ttft_s < best_s * (1.0 - self.rate):
                best_s, best = ttft_s, group
        return best, best_s

    # -- Algorithm 3 ------------------------------------------------------------------------------------------------

    def _chunk_plan(
        self, left: int, before: tuple[ChunkPlan, ...], past: int, current: int, following: int, pool: Pool
    ) -> tuple[int, tuple[int, ...], float]:
        """Return (tokens, group, queuing seconds) of a chunk on `current` instances that ends when `following` ones are
        free."""
        initial = before[-1].group if before else ()
        mine = self.get_group(pool, initial, current)
        others = self.get_group(pool, mine, following)
        queue_s = max(pool[i] for i in mine)
        budget_s = max(pool[i] for i in others) - queue_s
        tokens = self._latency.solve_tokens(past, budget_s, GroupShape(current)) if budget_s > 0 else 0
        return min(left, tokens), mine, queue_s

    # -- GetGroup ---------------------------------------------------------------------------------------------------

    def get_group(self, pool: Pool, initial: Sequence[int], size: int) -> tuple[int, ...]:
        """Return `initial` extended to `size` instances of the pool: first inside its nodes, then by whole nodes, then
        inside one more node."""
        chosen = list(initial)
        held = {self._nodes[i] for i in initial}
        inside = sorted((i for i in pool if self._nodes[i] in held and i not in chosen), key=lambda i: (pool[i], i))
        # 1. inside the nodes that the group has already
        chosen += inside[: size - len(chosen)]
        free: dict[int, list[int]] = {}
        for i in sorted(pool, key=lambda i: (pool[i], i)):
            if self._nodes[i] not in held:
                free.setdefault(self._nodes[i], []).append(i)
        # 2. whole nodes, of those with most instances, while no single one has enough
        whole = max(map(len, free.values()), default=0)
        while (need := size - len(chosen)) > whole > 0 and (
            full := [n for n, ids in free.items() if len(ids) == whole]
        ):
            node = min(full, key=lambda n: (pool[free[n][-1]], n))
            chosen += free.pop(node)
        # 3. the remainder inside one node; where none has enough, the shortest queues anywhere
        if need > 0:
            able = [n for n, ids in free.items() if len(ids) >= need]
            if able:
                node = min(able, key=lambda n: (pool[free[n][need - 1]], n))
                chosen += free[node][:need]
            else:
                rest = sorted((i for ids in free.values() for i in ids), key=lambda i: (pool[i], i))
                chosen += rest[:need]
        return tuple(sorted(chosen))

    def _prefill_s(self, size: int, past: int, tokens: int) -> float:
        return self._latency.prefill_s(past, tokens, GroupShape(size))
