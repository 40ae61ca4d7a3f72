"""The index of cached blocks by the prefix that they end (`kv.text_keys`).

One hash table finds the longest cached prefix, and a tree of parents keeps the order of eviction: only leaves are
evicted, hence a cached block's ancestors are cached too. Users are counted in an array over the blocks of the pool, so
that holding a prefix takes a few operations on runs of blocks however long it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from headway.core.errors import InvariantError
from headway.kv.allocator import Run

EVICTION_POLICIES = ("lru", "cost")
"""Least recently used first; cheapest to compute again first (`PrefixIndex`)."""
_UNLISTED = -1
"""Ticket of a node that is not a candidate for eviction."""


class PrefixNode(msgspec.Struct, gc=False, eq=False):
    """One cached block. Created and changed by `PrefixIndex` only.

    Nodes refer to their parents and to nothing that refers to them, so the collector need not look at them."""

    parent: PrefixNode | None
    key: Hashable
    block: int
    """Number of the block in the KV pool; no two cached blocks have the same."""
    depth: int
    """Blocks of the prefix, this one included; 0 for the root."""
    children: int = 0
    """Cached blocks that extend this prefix by one block."""
    stamp: float = 0.0
    """The index's age when its last user left."""
    ticket: int = _UNLISTED
    """Number of the valid entry in the heap of candidates for eviction."""


class PrefixIndex:
    """Cached prefixes as a tree over a hash table. O(1) a block, O(log n) a block that is evicted.

    Evicted first is the block that has been unused for longest; or, with `block_s`, the one that is cheapest to compute
    again, discounted by how long it has been unused. That is GreedyDual (Young 1994; GreedyDual-Size, Cao and Irani,
    USITS 1997): a block's rank is the seconds that computing it again takes, plus the rank of the last evicted block
    when it was used last. All blocks have the same bytes, so seconds order them as seconds per byte do. Attention makes
    deeper blocks dearer."""

    def __init__(self, block_s: Callable[[int], float] | None = None) -> None:
        """`block_s`: seconds to compute the block that ends a prefix of so many blocks."""
        self._block_s = block_s
        # What unused blocks have aged by: uses so far, or the rank of the last evicted block. No clock is read.
        self._age = 0.0
        # The empty prefix: always there, never evicted, no block.
        self.root = PrefixNode(None, None, -1, 0)
        # Blocks with users.
        self.in_use = 0
        self.changes: dict[Hashable, bool] | None = None
        """Keys that were inserted (True) or evicted since its reader emptied it; None: they are not noted."""
        self._nodes: dict[Hashable, PrefixNode] = {}
        # Users of each block of the pool: those whose prefix it is part of.
        self._users = np.zeros(1024, dtype=np.int32)
        # Unused leaves by (rank, ticket); entries whose ticket is not the node's are stale.
        self._leaves: list[tuple[float, int, PrefixNode]] = []
        self._tickets = 0
        self._listed = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def eviction(self) -> str:
        """Name of the order of eviction, of `EVICTION_POLICIES`."""
        return "lru" if self._block_s is None else "cost"

    @property
    def evictable(self) -> int:
        """Blocks without users. All of them can be evicted: whatever extends an unused prefix is unused."""
        return len(self._nodes) - self.in_use

    def nodes(self) -> Iterator[PrefixNode]:
        """Yield all cached blocks, in order of insertion."""
        return iter(self._nodes.values())

    def match(self, keys: Sequence[Hashable], start: PrefixNode | None = None) -> PrefixNode:
        """Return the node of the longest cached prefix.

        `keys`: those of the prompt's blocks, in order. `start`: a cached node known to be on the path."""
        node = start if start is not None else self.root
        find = self._nodes.get
        for key in keys[node.depth :] if node.depth else keys:
            found = find(key)
            if found is None:
                break
            node = found
        return node

    def extend(self, node: PrefixNode, keys: Sequence[Hashable], blocks: Sequence[int]) -> PrefixNode:
        """Insert blocks behind a cached prefix and return the last node. Keys that are cached keep their block.

        Raises InvariantError when a key is cached behind another prefix: keys must stand for whole prefixes."""
        nodes, find, changes = self._nodes, self._nodes.get, self.changes
        if blocks and (most := max(blocks)) >= len(self._users):
            self._users = np.concatenate((self._users, np.zeros(most + 1, dtype=np.int32)))
        for key, block in zip(keys, blocks, strict=True):
            found = find(key)
            if found is None:
                found = nodes[key] = PrefixNode(node, key, block, node.depth + 1)
                if changes is not None:
                    changes[key] = True
                if node.ticket != _UNLISTED:
                    self._unlist(node)
                node.children += 1
            elif found.parent is not node:
                raise InvariantError(f"key {key!r} stands for two prefixes")
            node = found
        if not (node is self.root or node.children or node.ticket != _UNLISTED or self._users[node.block]):
            node.stamp = self._stamp()
            self._list(node)
        return node

    def acquire(self, node: PrefixNode, runs: Sequence[Run] | None = None) -> None:
        """Keep a prefix from eviction until `release`. `runs`: its blocks, where the caller has them."""
        for first, count in self.runs(node) if runs is None else runs:
            users = self._users[first : first + count]
            self.in_use += count - int(np.count_nonzero(users))
            users += 1
        # Only a leaf is a candidate.
        if node.ticket != _UNLISTED:
            self._unlist(node)

    def advance(self, node: PrefixNode, end: PrefixNode) -> None:
        """Let one user of a prefix hold a longer one, which ends at `end`. O(blocks between)."""
        if end is not node and end.ticket != _UNLISTED:
            self._unlist(end)
        while end is not node:
            self.in_use += not self._users[end.block]
            self._users[end.block] += 1
            assert end.parent is not None
            end = end.parent

    def release(self, node: PrefixNode) -> None:
        """Undo one `acquire`."""
        stamp, ended = self._stamp(), 0
        for first, count in self.runs(node):
            users = self._users[first : first + count]
            if not users.all():
                raise InvariantError(f"a block of {first}..{first + count - 1} is released more often than acquired")
            users -= 1
            ended += count - int(np.count_nonzero(users))
        self.in_use -= ended
        leaf = node
        # Whatever extends an unused block is unused, so these are the last blocks of the prefix.
        for _ in range(ended):
            node.stamp = stamp
            assert node.parent is not None
            node = node.parent
        if ended and not leaf.children:
            self._list(leaf)

    def users(self, node: PrefixNode) -> int:
        """Return how many users hold a cached block."""
        return int(self._users[node.block])

    def used_blocks(self, runs: Sequence[Run]) -> int:
        """Return how many of these blocks are in use; of a prefix's, they are the first."""
        return sum(int(np.count_nonzero(self._users[first : first + count])) for first, count in runs)

    def evict(self) -> PrefixNode | None:
        """Remove the unused leaf of the lowest rank and return it. None: every block is in use."""
        while self._leaves:
            rank, ticket, node = heapq.heappop(self._leaves)
            if node.ticket != ticket:
                continue
            parent = node.parent
            assert parent is not None
            self._unlist(node)
            del self._nodes[node.key]
            if self.changes is not None:
                self.changes[node.key] = False
            if self._block_s is not None:
                self._age = max(self._age, rank)
            parent.children -= 1
            if not (parent.children or parent is self.root or self._users[parent.block]):
                self._list(parent)
            return node
        return None

    def path(self, node: PrefixNode, behind: int = 0) -> list[int]:
        """Return the blocks of a prefix but for its first `behind`, in order of its tokens."""
        blocks = []
        for _ in range(node.depth - behind):
            blocks.append(node.block)
            assert node.parent is not None
            node = node.parent
        blocks.reverse()
        return blocks

    def runs(self, node: PrefixNode, behind: int = 0) -> tuple[Run, ...]:
        """Return what `path` does, as runs."""
        blocks = np.array(self.path(node, behind), dtype=np.int64)
        ends = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), len(blocks)]
        return tuple((int(blocks[at]), end - at) for at, end in pairwise(ends) if end > at)

    def check(self) -> None:
        """Raise InvariantError unless counts, tree and candidates agree. O(blocks)."""
        if self._users.min() < 0:
            raise InvariantError("a block has fewer users than none")
        children: dict[int, int] = {}
        used: dict[int, int] = {}
        for node in self._nodes.values():
            parent = node.parent
            assert parent is not None
            if parent is not self.root and self._nodes.get(parent.key) is not parent:
                raise InvariantError(f"block {node.block} is cached without its parent")
            children[id(parent)] = children.get(id(parent), 0) + 1
            used[id(parent)] = used.get(id(parent), 0) + self.users(node)
        for node in self._nodes.values():
            if node.children != children.get(id(node), 0) or self.users(node) < used.get(id(node), 0):
                raise InvariantError(f"block {node.block} counts its children wrongly")
            if (node.ticket != _UNLISTED) != (not node.children and not self.users(node)):
                raise InvariantError(f"block {node.block} is wrongly listed for eviction, or not listed")
        if self.in_use != sum(self.users(node) > 0 for node in self._nodes.values()):
            raise InvariantError("the count of blocks in use is wrong")

    def _stamp(self) -> float:
        """Return the mark of a block whose last user leaves now."""
        if self._block_s is None:
            self._age += 1.0
        return self._age

    def _list(self, node: PrefixNode) -> None:
        self._tickets += 1
        node.ticket = self._tickets
        self._listed += 1
        rank = node.stamp if self._block_s is None else node.stamp + self._block_s(node.depth)
        heapq.heappush(self._leaves, (rank, node.ticket, node))

    def _unlist(self, node: PrefixNode) -> None:
        """Take a node off the candidates. Its entry becomes stale; stale ones are dropped when they are the most."""
        node.ticket = _UNLISTED
        self._listed -= 1
        if len(self._leaves) > 64 + 2 * self._listed:
            self._leaves = [entry for entry in self._leaves if entry[2].ticket == entry[1]]
            heapq.heapify(self._leaves)
