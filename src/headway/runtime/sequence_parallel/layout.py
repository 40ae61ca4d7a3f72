"""Layouts of a prompt over ranks: which tokens and heads each has, the group of a chunk, and the moves from one layout
to another. Pure data.

Re-balancing onto a larger group (Tetris §4.1), another strategy's cut, and transfer to a decode instance of another TP
degree are all two layouts and the moves between them. Pure data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headway.core.errors import ConfigError
from headway.core.request import Strategy, cut
from headway.runtime.model.config import DecoderConfig, ModelShard, divides

# Placement of a chunk's tokens on the members of a ring. Pure data.
#
# With a causal mask later tokens cost more, so that equal consecutive shares are unequal work. Zigzag (2N shards,
# member i takes the i-th and the i-th last; Tetris §2.2) and striped placement (every N-th token; Brandon et al. 2023)
# are even. Tokens that are decoded one by one all go to the first member, LoongServe's master (§4.2).

Positions = npt.NDArray[np.int64]
"""Global token positions of a request."""

Order = Literal["zigzag", "striped", "contiguous", "first"]
ORDERS: tuple[Order, ...] = ("zigzag", "striped", "contiguous")
"""Those that are even: of any chunk. `first` is for chunks in place."""


def spread(start: int, tokens: int, members: int, order: Order) -> tuple[Positions, ...]:
    """The positions in [start, start + tokens) of each member, ascending. Members get none where tokens run out.

    Shares differ by one token at most, in zigzag by two.
    """
    end = start + tokens
    if order == "striped":
        return tuple(np.arange(start + member, end, members, dtype=np.int64) for member in range(members))
    if order == "contiguous":
        return tuple(start + _share(tokens, members, member) for member in range(members))
    if order == "first":
        return tuple(np.arange(start, end if member == 0 else start, dtype=np.int64) for member in range(members))
    # Member i takes shards i and 2N - 1 - i: an early, cheap one and a late, costly one.
    shards = 2 * members
    return tuple(
        start + np.concatenate([_share(tokens, shards, i), _share(tokens, shards, shards - 1 - i)])
        for i in range(members)
    )


def share(size: int, parts: int, part: int) -> tuple[int, int]:
    """Return begin and end of part `part` of `size` items, cut evenly and in order into `parts`."""
    return part * size // parts, (part + 1) * size // parts


def _share(tokens: int, parts: int, part: int) -> Positions:
    return np.arange(*share(tokens, parts, part), dtype=np.int64)


# The ranks of one chunk, and how its attention is cut over them. Pure data.


class SpGroup(msgspec.Struct, frozen=True):
    """Ranks by their number in the transport, in order: `tp` ranks make a region (one copy of the model), whole regions
    make a node. `node` is the number of ranks a node, None for all: Ulysses exchanges heads within a node.
    """

    ranks: tuple[int, ...]
    tp: int = 1
    node: int | None = None

    def __post_init__(self) -> None:
        size = len(self.ranks)
        if not size or len(set(self.ranks)) != size or min(self.ranks) < 0:
            raise ConfigError(f"group.ranks {self.ranks}: at least one rank, each once, none negative")
        if self.tp < 1 or size % self.tp:
            raise ConfigError(f"group.tp {self.tp}: must divide the group's {size} ranks")
        if self.node is not None and (self.node < 1 or size % self.node or self.node % self.tp):
            raise ConfigError(f"group.node {self.node}: must divide {size} ranks and be a multiple of tp {self.tp}")

    def region(self, index: int) -> tuple[int, ...]:
        """The indices of the ranks that share the model with rank `index`, itself included."""
        first = index // self.tp * self.tp
        return tuple(range(first, first + self.tp))


class ChunkSpec(msgspec.Struct, frozen=True):
    """One chunk of a prompt: tokens [start, end) on a group, with a strategy. The data that a span carries.

    Strategies: `ulysses` is Ulysses, for tp 1. `ring`, `megatron` and `local` are one form: activations are gathered
    within a TP region and KV is passed round a ring of regions. Nothing is gathered at tp 1, and nothing is passed
    with one region.
    """

    start: int
    end: int
    group: SpGroup
    strategy: Strategy = Strategy()
    order: Order = "zigzag"
    preemptible: bool = False
    """The first rank may pause the chunk between layers."""
    in_place: bool = False
    """KV of earlier chunks stays where it lies, and rows are sent to it: for chunks of few rows, such as one token
    that is decoded over the KV of a whole group (LoongServe §4.2). KV whose heads are cut otherwise is laid out
    anew, as before any other chunk."""
    keepers: tuple[int, ...] = ()
    """Ranks on which KV of an in-place chunk stays, the group's first among them; KV of the others is moved to
    these while the layers are computed (scale-down). Empty: all ranks."""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ConfigError(f"chunk [{self.start}, {self.end}): must begin at 0 or later and hold at least one token")
        orders = (*ORDERS, "first") if self.in_place else ORDERS
        if self.order not in orders:
            raise ConfigError(f"order '{self.order}': must be one of {', '.join(orders)}")
        if self.keepers:
            self._check_keepers()

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def width(self) -> int:
        """Ranks that share one ring member's tokens, each with some of the heads."""
        group = self.group
        return (group.node or len(group.ranks)) if self.strategy.attn == "ulysses" else group.tp

    @property
    def members(self) -> int:
        """Members of the ring: nodes under Ulysses, else TP regions."""
        return len(self.group.ranks) // self.width

    def _check_keepers(self) -> None:
        ranks, kept = self.group.ranks, set(self.keepers)
        members = [ranks[at : at + self.width] for at in range(0, len(ranks), self.width)]
        whole = all(kept.issuperset(member) or kept.isdisjoint(member) for member in members)
        if not self.in_place or not kept.issubset(ranks) or ranks[0] not in kept or not whole:
            raise ConfigError(
                f"keepers {self.keepers}: must be whole members, the first included, of {ranks}, in place"
            )

    def check(self, config: DecoderConfig) -> None:
        """Raise ConfigError where the model's heads cannot be cut so."""
        if self.group.tp > 1 and self.strategy.attn == "ulysses":
            raise ConfigError("attn: ulysses is for instances of one process; of others each rank keeps its own heads")
        for name, ranks in (("tp", self.group.tp), ("ulysses", self.width)):
            if not divides(config, ranks):
                raise ConfigError(
                    f"{name} over {ranks} ranks: must divide {config.q_heads} query heads, and divide or be a multiple "
                    f"of {config.kv_heads} KV heads"
                )

    def heads(self, index: int) -> ModelShard:
        """The heads that the rank at `index` attends with, as a shard of the whole model."""
        return ModelShard(index % self.width, self.width)


@dataclass(frozen=True, slots=True)
class HeldShard:
    """KV that one rank holds."""

    heads: range
    """KV heads of the whole model."""
    positions: Positions
    """Tokens, in the order of the rank's slots."""


KvLayout = Mapping[int, HeldShard]
"""By rank. A rank that is absent holds nothing."""

EMPTY: KvLayout = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class KvMove:
    """Keys and values of `heads`, from slots of rank `source` to as many of rank `target`. Both may be one rank."""

    source: int
    target: int
    heads: range
    from_slots: Positions
    to_slots: Positions


def balanced(held: KvLayout, spec: ChunkSpec, config: DecoderConfig) -> KvLayout:
    """Return the layout of history for a chunk: even over the ring's members, cut by heads over each member's ranks.

    As little KV as possible moves: a member keeps the first of the tokens that its ranks hold, up to its share, and the
    surplus fills shares that are short. History needs no placement order: every row sees all of it (Tetris §4.1). Where
    only `spec.keepers` keep KV, the shares are theirs.

    Raises ConfigError unless the group includes all ranks that hold something, as the paper demands, and unless they
    hold exactly the tokens before the chunk.
    """
    ranks = spec.group.ranks
    _include(held, ranks)
    # Positions count from 0: the greatest one held plus one is the number of tokens.
    past = 1 + max((int(one.positions.max()) for one in held.values() if len(one.positions)), default=-1)
    if past != spec.start:
        raise ConfigError(f"chunk start {spec.start}: KV is held up to token {past}")
    if not spec.keepers and _even(held, spec, config, past):
        return {rank: held[rank] for rank in ranks}
    free = np.ones(past, dtype=bool)
    sizes = _sizes(spec, past)
    shares: list[Positions] = []
    for member, size in enumerate(sizes):
        # A member's ranks may hold different tokens after another strategy's cut: their union is what the member has.
        own = _union([held[rank].positions for rank in _ranks(spec, member) if rank in held])
        # A token held by several members is kept by the first of them only.
        kept = own[free[own]][:size]
        free[kept] = False
        shares.append(kept)
    everyone = _union([held[rank].positions for rank in ranks if rank in held])
    surplus, taken = everyone[free[everyone]], 0
    layout = {}
    for member, size in enumerate(sizes):
        short = size - len(shares[member])
        positions = np.concatenate([shares[member], surplus[taken : taken + short]])
        taken += short
        for index in range(member * spec.width, (member + 1) * spec.width):
            layout[ranks[index]] = HeldShard(spec.heads(index).kv_heads(config), positions)
    return layout


def _sizes(spec: ChunkSpec, tokens: int) -> list[int]:
    """Return each member's share of so many tokens."""
    keep = _keep(spec)
    edges = {member: share(tokens, len(keep), at) for at, member in enumerate(keep)}
    return [end - first for first, end in (edges.get(member, (0, 0)) for member in range(spec.members))]


def _keep(spec: ChunkSpec) -> list[int]:
    """Return the members that keep KV."""
    first_ranks = spec.group.ranks[:: spec.width]
    return [member for member, rank in enumerate(first_ranks) if not spec.keepers or rank in spec.keepers]


def _even(held: KvLayout, spec: ChunkSpec, config: DecoderConfig, past: int) -> bool:
    """Whether every member holds exactly its share already."""
    for index, rank in enumerate(spec.group.ranks):
        member, part = divmod(index, spec.width)
        first, end = share(past, spec.members, member)
        one = held.get(rank)
        if one is None or len(one.positions) != end - first or one.heads != spec.heads(index).kv_heads(config):
            return False
        # A member's ranks differ in heads only: they must hold the same tokens in the same order.
        if part and not np.array_equal(one.positions, held[spec.group.ranks[index - part]].positions):
            return False
    return True


def fits(held: KvLayout, spec: ChunkSpec, config: DecoderConfig) -> bool:
    """Whether a chunk can be computed without moving KV.

    That is when its ranks hold the heads that they attend with, and each token is on one member. KV that is cut by
    heads (Ulysses) does not fit a ring, and the reverse.
    """
    ranks = spec.group.ranks
    past = sum(len(held[rank].positions) for rank in ranks[:: spec.width] if rank in held)
    own = (spec.heads(index).kv_heads(config) for index in range(len(ranks)))
    return past == spec.start and all(
        held[rank].heads == heads for rank, heads in zip(ranks, own, strict=True) if rank in held
    )


def stayed(held: KvLayout, spec: ChunkSpec, config: DecoderConfig) -> KvLayout:
    """Return the layout of history that fits the chunk and does not move. Ranks without KV get an empty shard."""
    nothing = np.empty(0, dtype=np.int64)
    return {
        rank: held.get(rank) or HeldShard(spec.heads(index).kv_heads(config), nothing)
        for index, rank in enumerate(spec.group.ranks)
    }


def packed(held: KvLayout, spec: ChunkSpec, config: DecoderConfig) -> KvLayout:
    """Return the layout of fitting history for a chunk whose KV only `spec.keepers` keep (scale-down).

    The keepers' KV does not move; that of other ranks goes to the keepers with least, to level them.
    """
    history, width = dict(stayed(held, spec, config)), spec.width
    first_ranks = spec.group.ranks[::width]
    keep = _keep(spec)
    surplus = _union([history[rank].positions for rank in first_ranks if rank not in spec.keepers])
    counts = _levelled([len(history[first_ranks[member]].positions) for member in keep], len(surplus))
    gone = np.empty(0, dtype=np.int64)
    taken = 0
    for member in range(spec.members):
        more = gone
        if member in keep:
            own = len(history[first_ranks[member]].positions)
            more = surplus[taken : taken + counts[keep.index(member)] - own]
            taken += len(more)
        for rank in _ranks(spec, member):
            one = history[rank]
            history[rank] = HeldShard(one.heads, np.concatenate([one.positions, more]) if member in keep else gone)
    return history


def _levelled(counts: Sequence[int], more: int) -> list[int]:
    """Return counts after `more` units are added to the smallest ones, levelling these."""
    filled = list(counts)
    low = sorted(range(len(counts)), key=lambda i: (counts[i], i))
    # Drop the largest count while it lies above the level that the rest would reach.
    while counts[low[-1]] * len(low) > sum(counts[i] for i in low) + more:
        low.pop()
    total = sum(counts[i] for i in low) + more
    for at, i in enumerate(low):
        first, end = share(total, len(low), at)
        filled[i] = end - first
    return filled


def history_of(held: KvLayout, spec: ChunkSpec, config: DecoderConfig) -> KvLayout:
    """Return the layout of earlier chunks' KV while a chunk is computed. Raises ConfigError as `balanced`.

    For an in-place chunk KV is laid out anew only where it does not fit.
    """
    _include(held, spec.group.ranks)
    if spec.in_place and fits(held, spec, config):
        return (packed if spec.keepers else stayed)(held, spec, config)
    return balanced(held, spec, config)


def _include(held: KvLayout, ranks: Sequence[int]) -> None:
    if missing := sorted({rank for rank, one in held.items() if len(one.positions)} - set(ranks)):
        raise ConfigError(f"group.ranks {ranks}: must include ranks {missing}, which hold KV of earlier chunks")


def extended(history: KvLayout, spec: ChunkSpec, fresh: Sequence[Positions]) -> KvLayout:
    """Return the layout after a chunk: each member's tokens (`fresh`) behind its share of history."""
    layout = {}
    for index, rank in enumerate(spec.group.ranks):
        one = history[rank]
        layout[rank] = HeldShard(one.heads, np.concatenate([one.positions, fresh[index // spec.width]]))
    return layout


def moves(before: KvLayout, after: KvLayout) -> tuple[KvMove, ...]:
    """Return the moves from layout `before` to `after`, by target, then source. They cover all that `after` holds.

    A target takes KV from itself where it has it; where a head is on several ranks, targets begin with different
    sources. Moves that change nothing (same rank, same slots) are included: `KvMoves` drops them where storage is kept.
    """
    # Head ranges between neighbouring edges are held as a whole or not at all, by every rank and in both layouts.
    edges = sorted(
        {edge for held in (before, after) for one in held.values() for edge in (one.heads[0], one.heads[-1] + 1)}
    )
    classes = [range(*pair) for pair in pairwise(edges)]
    tokens = 1 + max((int(one.positions.max()) for one in before.values() if len(one.positions)), default=-1)
    slots = {rank: _slots(one.positions, tokens) for rank, one in before.items()}
    found: dict[tuple[int, int], list[tuple[range, Positions, Positions]]] = {}
    for target, wanted in after.items():
        for heads in classes:
            if heads[0] not in wanted.heads or not len(wanted.positions):
                continue
            # Each source in turn gives what is still missing, so that every token comes exactly once.
            missing = np.ones(len(wanted.positions), dtype=bool)
            for source in _sources(target, heads[0], before):
                at = slots[source][wanted.positions]
                got = np.flatnonzero(missing & (at >= 0))
                if len(got):
                    missing[got] = False
                    found.setdefault((target, source), []).append((heads, at[got], got))
            if missing.any():
                raise ConfigError(f"no rank holds KV of token {wanted.positions[missing][0]}, head {heads[0]}")
    return tuple(
        KvMove(source, target, heads, from_slots, to_slots)
        for (target, source), parts in sorted(found.items(), key=lambda item: item[0])
        for heads, from_slots, to_slots in _joined(parts)
    )


def _joined(
    parts: Sequence[tuple[range, Positions, Positions]],
) -> Iterator[tuple[range, Positions, Positions]]:
    """Join moves of neighbouring head ranges whose tokens move alike."""
    open_part = None
    for heads, from_slots, to_slots in parts:
        if open_part and open_part[0].stop == heads.start and np.array_equal(open_part[2], to_slots):
            open_part = (range(open_part[0].start, heads.stop), from_slots, to_slots)
            continue
        if open_part:
            yield open_part
        open_part = (heads, from_slots, to_slots)
    if open_part:
        yield open_part


def _sources(target: int, head: int, held: KvLayout) -> list[int]:
    """Return the ranks with that head: the target first if it has it, then the others, rotated by the target."""
    ranks = sorted(rank for rank, one in held.items() if head in one.heads)
    first = ranks.index(target) if target in ranks else target % max(1, len(ranks))
    return ranks[first:] + ranks[:first]


def _slots(positions: Positions, tokens: int) -> Positions:
    slots = np.full(tokens, -1, dtype=np.int64)
    slots[positions] = np.arange(len(positions))
    return slots


def _union(parts: Sequence[Positions]) -> Positions:
    """Return each position once, in order of first appearance."""
    if not parts:
        return np.empty(0, dtype=np.int64)
    if all(part is parts[0] for part in parts):
        return parts[0]
    joined = np.concatenate(parts)
    _, first = np.unique(joined, return_index=True)
    return joined[np.sort(first)]


def _ranks(spec: ChunkSpec, member: int) -> tuple[int, ...]:
    return spec.group.ranks[member * spec.width : (member + 1) * spec.width]


# Division of a span task into successive chunks on one group, which bounds the rows computed at once.
#
# Between the chunks of a task no KV moves (`core.request.cut`). Cost: a ring passes all KV so far once for each chunk,
# so n chunks at the beginning of a prompt pass (n + 1) / 2 times the KV of one. Gain: activations are those of a chunk,
# and so is the duration of a layer, for which a pause or a message waits.


def pieces(spec: ChunkSpec, rows: int) -> tuple[ChunkSpec, ...]:
    """Return `spec` as chunks of at most `rows` rows a TP region; undivided for 0, and in place, where rows are few."""
    if not rows or spec.in_place:
        return (spec,)
    regions = len(spec.group.ranks) // spec.group.tp
    edges = cut(spec.start, spec.end, regions, rows)
    return tuple(msgspec.structs.replace(spec, start=start, end=end) for start, end in edges)


def layout_after(chunks: Sequence[ChunkSpec], held: KvLayout, config: DecoderConfig) -> KvLayout:
    """Return the KV layout after all chunks of a task: the same as from one `ChunkPlan` after the other.

    That is history, balanced once, followed by each member's tokens of chunk after chunk. Raises ConfigError.
    """
    first = chunks[0]
    first.check(config)
    history = history_of(held, first, config)
    # History is balanced once, before the first chunk; between the chunks of a task KV does not move.
    shares = [spread(one.start, one.tokens, one.members, one.order) for one in chunks]
    return extended(history, first, [np.concatenate(fresh) for fresh in zip(*shares, strict=True)])
