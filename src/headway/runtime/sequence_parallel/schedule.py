"""Schedules of a chunk as data: the steps of a layer on each rank, for ring and Ulysses attention and for the exchanges
of activations and weights.

A register is a matrix under a name. Each is read once, which also frees it; `ROWS`, the residual stream, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

from headway.core.errors import ConfigError
from headway.runtime.model.config import DecoderConfig, ModelShard
from headway.runtime.sequence_parallel.layout import (
    ChunkSpec,
    KvLayout,
    KvMove,
    Positions,
    SpGroup,
    extended,
    fits,
    history_of,
    moves,
    share,
    spread,
)

# A causal mask over arbitrary rows and keys, cut into the two shapes that the attention primitive has.
#
# Row i sees the first v(i) keys, and v never falls: a staircase. Where it is flat, rows see one rectangle; where it
# rises by one a row, a rectangle and a causal square. Zigzag, striped, contiguous and history then need no code of
# their own: in zigzag each step of a ring comes out as one rectangle, in striped as one causal square, with a row and a
# key dropped where the keys come from a later member.


class MaskBlock(NamedTuple):
    """Rows [row, row_end) attend to keys [key, key_end). Causal blocks are square: the i-th row sees keys 0..i."""

    row: int
    row_end: int
    key: int
    key_end: int
    causal: bool


def mask_blocks(queries: Positions, keys: Positions, past: int = 0) -> tuple[MaskBlock, ...]:
    """Blocks that hold each pair (row, key) with keys[key] <= queries[row] exactly once, and nothing else.

    queries, keys: ascending. `past` keys that every row sees come before the others; keys are numbered past included.
    No block is empty.
    """
    # seen[i]: the number of keys that row i sees, that is v(i) of the module's docstring.
    seen = past + np.searchsorted(keys, queries, side="right")
    rows = len(queries)
    first = int(np.searchsorted(seen, 1))  # rows before it see nothing
    rise = np.diff(seen)
    turns = np.append(np.flatnonzero(np.diff(rise)) + 1, max(rows - 1, 0))  # rows from which the rise is another
    blocks: list[MaskBlock] = []
    row = first
    while row < rows:
        last = row
        # A rise by 0 or 1 goes on for several rows; a larger one makes the row a rectangle of its own.
        if row < rows - 1 and rise[row] <= 1:
            last = int(turns[np.searchsorted(turns, row, side="right")])
        height, visible = last + 1 - row, int(seen[row])
        if height > 1 and rise[row] == 1:
            if visible > 1:
                # All rows see the keys before the staircase; the square begins with the last key that the first row
                # sees.
                blocks.append(MaskBlock(row, last + 1, 0, visible - 1, False))
            blocks.append(MaskBlock(row, last + 1, visible - 1, visible - 1 + height, True))
        else:
            blocks.append(MaskBlock(row, last + 1, 0, visible, False))
        row = last + 1
    return tuple(blocks)


# Schedule of ring attention: for each step the keys that a member attends to, the mask blocks, and the transfers.
#
# Every member begins with its own keys and passes on what it has just begun to attend to (Liu et al. 2023), history
# included (Tetris §5). A member's keys travel as one block: its share of history, then its tokens of the chunk.


class RingStep(NamedTuple):
    """Attend to the keys of member `source` (as many as `keys`) while they go to the next member, and those of member
    `arriving` (`arriving_keys`) come from the one before; -1 in the last step. Nothing travels where there are no keys.
    """

    source: int
    keys: int
    arriving: int
    arriving_keys: int
    blocks: tuple[MaskBlock, ...]


def ring(member: int, fresh: Sequence[Positions], past: Sequence[int]) -> tuple[RingStep, ...]:
    """Return the steps of one member. fresh: all members' tokens of the chunk; past: all members' share of history."""
    members = len(fresh)
    steps = []
    for step in range(members):
        # Blocks travel from member i to i + 1: after k steps a member has the block of member i - k.
        source, arriving = (member - step) % members, (member - step - 1) % members
        last = step == members - 1
        steps.append(
            RingStep(
                source,
                past[source] + len(fresh[source]),
                -1 if last else arriving,
                0 if last else past[arriving] + len(fresh[arriving]),
                mask_blocks(fresh[member], fresh[source], past[source]),
            )
        )
    return tuple(steps)


ROWS = "rows"


class RegisterSlice(NamedTuple):
    """A rectangle of a register."""

    row: int
    row_end: int
    column: int
    column_end: int

    @property
    def size(self) -> int:
        return (self.row_end - self.row) * (self.column_end - self.column)


class PeerMessage(NamedTuple):
    """One message to or from rank `peer`: these cuts, one after the other."""

    peer: int
    cuts: tuple[RegisterSlice, ...]


@dataclass(frozen=True, slots=True)
class ExchangeRows:
    """Cuts of register `source` become cuts of the peers' registers `target`, (rows, columns) here.

    A piece from a rank to itself is in both lists. add: pieces are summed, in the order of `receives`, else they tile
    the target. Gathering rows, scattering sums, the two all-to-alls of Ulysses and gathering weights are of this kind.
    """

    source: str
    target: str
    rows: int
    columns: int
    sends: tuple[PeerMessage, ...]
    receives: tuple[PeerMessage, ...]
    add: bool = False


@dataclass(frozen=True, slots=True)
class EmbedTokens:
    """Tokens at `positions` to rows; with a cut vocabulary this rank's part of the sum."""

    target: str
    positions: Positions


@dataclass(frozen=True, slots=True)
class NormRows:
    """Normalise ROWS, `source`, with the layer's norm or the final one."""

    which: Literal["attention", "mlp", "final"]
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class ProjectHeads:
    """Rows to rotated query, key and value heads."""

    source: str
    target: str
    positions: Positions


@dataclass(frozen=True, slots=True)
class RingAttend:
    """Store the chunk's keys and values behind `past` tokens of history, then go round the ring: blocks come from rank
    `before` and go to rank `behind`.
    """

    source: str
    target: str
    steps: tuple[RingStep, ...]
    past: int
    before: int
    behind: int


class MemberRows(NamedTuple):
    """Rows of another rank that are attended over this rank's keys."""

    rank: int
    """The rows' rank."""
    rows: int
    blocks: tuple[MaskBlock, ...]
    """Which of this rank's keys they see."""
    attended: bool
    """Whether this rank's rows see any of that rank's keys."""


@dataclass(frozen=True, slots=True)
class AttendInPlace:
    """Store the chunk's keys and values behind `past` tokens of history; then rows go to the keys. Each of `members`,
    this rank among them, gets the answer of its rows over this rank's keys, and this rank's rows get theirs.
    """

    source: str
    target: str
    members: tuple[MemberRows, ...]
    past: int


@dataclass(frozen=True, slots=True)
class ProjectOutput:
    """The projection after attention."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The MLP, of this rank's weights or, `whole`, of those that were gathered."""

    source: str
    target: str
    whole: bool


@dataclass(frozen=True, slots=True)
class AddRows:
    """Add to ROWS."""

    source: str


@dataclass(frozen=True, slots=True)
class ComputeLogits:
    """Rows to logits of this rank's slice of the vocabulary, fp32."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class WholeLayer:
    """A whole layer over ROWS, for a rank that has all of it: `steps` in the place of attention turn register `source`,
    query, key and value heads at `positions`, rotated, into `target`.
    """

    positions: Positions
    source: str
    target: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class StartWeights:
    """Begin to gather the whole weights of this layer's MLP."""

    parts: tuple[ExchangeRows, ...]


@dataclass(frozen=True, slots=True)
class FinishWeights:
    """Wait for the gathered weights."""


@dataclass(frozen=True, slots=True)
class StartHistory:
    """Begin to move KV of earlier chunks, of this layer or (`ahead`) of the next."""

    ahead: bool


@dataclass(frozen=True, slots=True)
class FinishHistory:
    """Wait for this layer's KV of earlier chunks."""


Step = (
    ExchangeRows | EmbedTokens | NormRows | ProjectHeads | RingAttend | AttendInPlace | ProjectOutput
    | FeedForward | AddRows | ComputeLogits | WholeLayer | StartWeights
    | FinishWeights | StartHistory | FinishHistory
)  # fmt: skip

Pairs = tuple[tuple[RegisterSlice, ...], tuple[RegisterSlice, ...]]
"""Cuts of a source, and the cuts of a target that they become."""

Between = Callable[[int, int], Pairs]
"""What goes from rank i to rank j, both being indices of a group."""


def exchange(
    source: str,
    target: str,
    shape: tuple[int, int],
    index: int,
    peers: Iterable[int],
    ranks: tuple[int, ...],
    between: Between,
    add: bool = False,
) -> ExchangeRows:
    """The part in an exchange of the rank at `index`: what goes out to and comes in from each of `peers` (indices)."""
    sends, receives = [], []
    for peer in peers:
        out, into = _filled(between(index, peer)[0]), _filled(between(peer, index)[1])
        if out:
            sends.append(PeerMessage(ranks[peer], out))
        if into:
            receives.append(PeerMessage(ranks[peer], into))
    return ExchangeRows(source, target, *shape, tuple(sends), tuple(receives), add)


def _filled(cuts: tuple[RegisterSlice, ...]) -> tuple[RegisterSlice, ...]:
    return tuple(cut for cut in cuts if cut.size)


# The exchanges of activations in one chunk, given the rows that each rank keeps. Pure data.

NOTHING: Pairs = ((), ())


class ChunkExchanges:
    """Exchanges of the rank at `index` of the chunk's group. rows: the positions of every rank's rows, by index."""

    def __init__(self, spec: ChunkSpec, config: DecoderConfig, rows: Sequence[Positions], index: int) -> None:
        self._spec, self._config, self._rows, self._index = spec, config, rows, index
        self._ranks = spec.group.ranks
        self._region = spec.group.region(index)
        first = index // spec.width * spec.width
        self._node = range(first, first + spec.width)

    def gather(self, source: str, target: str) -> ExchangeRows:
        """All-gather: every rank of the region gets all of the region's rows."""
        at, width = self._offsets(self._region), self._config.hidden_size

        def between(i: int, j: int) -> Pairs:
            count = len(self._rows[i])
            return (RegisterSlice(0, count, 0, width),), (RegisterSlice(at[i], at[i] + count, 0, width),)

        return exchange(source, target, (at[-1], width), self._index, self._region, self._ranks, between)

    def scatter(self, source: str, target: str) -> ExchangeRows:
        """Reduce-scatter: each rank of the region gets the sum of all ranks' results for its rows."""
        at, width = self._offsets(self._region), self._config.hidden_size

        def between(i: int, j: int) -> Pairs:
            count = len(self._rows[j])
            return (RegisterSlice(at[j], at[j] + count, 0, width),), (RegisterSlice(0, count, 0, width),)

        shape = (len(self._rows[self._index]), width)
        return exchange(source, target, shape, self._index, self._region, self._ranks, between, add=True)

    def to_heads(self, source: str, target: str) -> ExchangeRows:
        """All-to-all before attention: from all heads of own rows to own heads of all of the node's rows."""
        config, at, dim = self._config, self._offsets(self._node), self._config.head_dim

        def between(i: int, j: int) -> Pairs:
            shard, count = self._spec.heads(j), len(self._rows[i])
            q, kv = shard.q_heads(config), shard.kv_heads(config)
            out, into, to = [], [], 0
            for heads, before in ((q, 0), (kv, config.q_heads), (kv, config.q_heads + config.kv_heads)):
                out.append(RegisterSlice(0, count, (before + heads.start) * dim, (before + heads.stop) * dim))
                into.append(RegisterSlice(at[i], at[i] + count, to, to + len(heads) * dim))
                to += len(heads) * dim
            return tuple(out), tuple(into)

        shard = self._spec.heads(self._index)
        columns = (len(shard.q_heads(config)) + 2 * len(shard.kv_heads(config))) * dim
        return exchange(source, target, (at[-1], columns), self._index, self._node, self._ranks, between)

    def to_rows(self, source: str, target: str) -> ExchangeRows:
        """All-to-all after attention: from own heads of all of the node's rows to all heads of own rows."""
        config, at, dim = self._config, self._offsets(self._node), self._config.head_dim

        def between(i: int, j: int) -> Pairs:
            count, heads = len(self._rows[j]), self._spec.heads(i).q_heads(config)
            return (
                (RegisterSlice(at[j], at[j] + count, 0, len(heads) * dim),),
                (RegisterSlice(0, count, heads.start * dim, heads.stop * dim),),
            )

        shape = (len(self._rows[self._index]), config.q_heads * dim)
        return exchange(source, target, shape, self._index, self._node, self._ranks, between)

    def last_rows(self, target: str, wanted: Sequence[int]) -> ExchangeRows:
        """Send the rows at positions `wanted` from the ranks that have them to every rank of the first region."""
        width, readers = self._config.hidden_size, self._spec.group.region(0)
        at = [np.flatnonzero(np.isin(rows, wanted)) for rows in self._rows]
        to = [[wanted.index(position) for position in rows[own]] for rows, own in zip(self._rows, at, strict=True)]

        def between(i: int, j: int) -> Pairs:
            if j not in readers:
                return NOTHING
            out = tuple(RegisterSlice(int(row), int(row) + 1, 0, width) for row in at[i])
            return out, tuple(RegisterSlice(row, row + 1, 0, width) for row in to[i])

        everyone = range(len(self._ranks))
        return exchange(ROWS, target, (len(wanted), width), self._index, everyone, self._ranks, between)

    def logits(self, source: str, target: str, rows: int) -> ExchangeRows:
        """Gather the first region's slices of the vocabulary side by side on the first rank."""
        config, tp = self._config, self._spec.group.tp

        def between(i: int, j: int) -> Pairs:
            if j:
                return NOTHING
            vocabulary = ModelShard(i, tp).vocabulary(config)
            return (RegisterSlice(0, rows, 0, len(vocabulary)),), (
                RegisterSlice(0, rows, vocabulary.start, vocabulary.stop),
            )

        shape = (rows, config.vocab_size)
        return exchange(source, target, shape, self._index, self._spec.group.region(0), self._ranks, between)

    def _offsets(self, indices: Sequence[int]) -> _RowOffsets:
        return _RowOffsets(indices, [len(self._rows[i]) for i in indices])


class _RowOffsets:
    """Offsets of each rank's rows when those of `indices` are concatenated; [-1] is the total."""

    def __init__(self, indices: Sequence[int], sizes: Sequence[int]) -> None:
        edges = accumulate(sizes, initial=0)
        self._at = dict(zip([*indices, -1], edges, strict=True))

    def __getitem__(self, index: int) -> int:
        return self._at[index]


# Gathering the MLP's whole weights within a TP region (PecSched §5.3, step 4). Pure data.

OWN, WHOLE = "own", "whole"


def gathered_weights(config: DecoderConfig, group: SpGroup, index: int) -> tuple[ExchangeRows, ...]:
    """From registers `own.<matrix>.weight` and `own.<matrix>.bias` of the region's ranks to `whole.…` on each."""
    hidden, size, tp = config.hidden_size, config.mlp_size, group.tp

    def make(name: str, shape: tuple[int, int], between: Between) -> ExchangeRows:
        return exchange(f"{OWN}.{name}", f"{WHOLE}.{name}", shape, index, group.region(index), group.ranks, between)

    def held(i: int) -> range:
        return ModelShard(i % tp, tp).mlp(config)

    def rows(width: int) -> Between:
        def between(i: int, _: int) -> Pairs:
            own = held(i)
            # Gate's rows, then those of up, in the rank's own matrix as in the whole one.
            places = [(part * len(own), part * size + own.start) for part in (0, 1)]
            return (
                tuple(RegisterSlice(at, at + len(own), 0, width) for at, _ in places),
                tuple(RegisterSlice(at, at + len(own), 0, width) for _, at in places),
            )

        return between

    def columns(i: int, _: int) -> Pairs:
        own = held(i)
        return (RegisterSlice(0, hidden, 0, len(own)),), (RegisterSlice(0, hidden, own.start, own.stop),)

    def from_first(i: int, _: int) -> Pairs:
        cut = (RegisterSlice(0, hidden, 0, 1),)
        # The bias of a summed layer is held by the first rank of the region alone (`model.loading`).
        return (cut, cut) if i % tp == 0 else NOTHING

    parts = [make("gate_up.weight", (2 * size, hidden), rows(hidden)), make("down.weight", (hidden, size), columns)]
    if config.mlp_bias:
        parts += [make("gate_up.bias", (2 * size, 1), rows(1)), make("down.bias", (hidden, 1), from_first)]
    return tuple(parts)


# Plan of one chunk on every rank: its rows, the layout of its KV, and the steps of a layer. Pure data.
#
# The combinations of fast SP (PecSched §5.3) differ in nothing but these lists. Each rank keeps a slice of the rows of
# its ring member, the member's ranks being a TP region or, under Ulysses, a node.
#
# attention, Megatron form: gather rows in the region, own heads of them, ring between regions, scatter the sums
# attention, Ulysses (tp 1): all heads of own rows, all-to-all to own heads, ring between nodes, all-to-all
# MLP, Megatron form: gather rows in the region, own slice of the MLP, scatter the sums
# MLP, Ulysses: whole weights, own rows
#
# Ulysses attention with tp above 1, for which every rank would gather the attention's whole weights, is refused.
#
# The MLP's weights begin to travel before the attention; KV of earlier chunks begins to move for the next layer once
# the ring of this one is done (Tetris §4.1), so that both overlap with linear layers.


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part in a chunk, as steps."""

    enter: tuple[Step, ...]
    """Once, before the layers."""
    fetch: tuple[Step, ...]
    """Before the first layer, and again before the layer at which a paused chunk continues."""
    layer: tuple[Step, ...]
    """Every layer."""
    leave: tuple[Step, ...]
    """Once, after the layers."""
    answers: bool
    """Whether `leave` fills the register `LOGITS`."""


LOGITS = "logits"


class ChunkPlan:
    """Plan of a chunk, derived from the KV layout `held` before it: equal on every rank."""

    def __init__(
        self, spec: ChunkSpec, held: KvLayout, config: DecoderConfig, wanted: Sequence[int] | None = None
    ) -> None:
        """wanted: the positions whose logits are asked for (None: the last; maybe none). Raises ConfigError."""
        spec.check(config)
        self.spec, self.config, self.before = spec, config, held
        self.wanted = tuple(wanted) if wanted is not None else (spec.end - 1,)
        if any(not spec.start <= position < spec.end for position in self.wanted):
            raise ConfigError(f"wanted {self.wanted}: must be positions of the chunk [{spec.start}, {spec.end})")
        self.history = history_of(held, spec, config)
        """The layout to which KV of earlier chunks moves."""
        self.stays = spec.in_place and not spec.keepers and fits(held, spec, config)
        """Whether no KV of earlier chunks moves."""
        self.fresh = spread(spec.start, spec.tokens, spec.members, spec.order)
        """For each ring member, the positions of the chunk whose KV it gets."""
        self.after = extended(self.history, spec, self.fresh)
        """`history` with the chunk's own KV."""
        # Each member's tokens are cut evenly over its ranks: between attention calls a rank works on its own rows.
        self.rows: tuple[Positions, ...] = tuple(
            positions[slice(*share(len(positions), spec.width, part))]
            for positions in self.fresh
            for part in range(spec.width)
        )

    def moves(self) -> tuple[KvMove, ...]:
        """Return the moves of earlier chunks' KV."""
        return () if self.stays else moves(self.before, self.history)

    def rank(self, rank: int) -> RankPlan:
        """Return the plan of one rank of the group."""
        return _RankPlanner(self, self.spec.group.ranks.index(rank)).plan()


class _RankPlanner:
    def __init__(self, chunk: ChunkPlan, index: int) -> None:
        self._chunk, self._index = chunk, index
        self._spec, self._group = chunk.spec, chunk.spec.group
        self._exchanges = ChunkExchanges(chunk.spec, chunk.config, chunk.rows, index)
        self._region = np.concatenate([chunk.rows[i] for i in self._group.region(index)])
        self._cut = self._group.tp > 1
        self._ulysses = self._spec.strategy.attn == "ulysses"
        self._whole_mlp = self._cut and self._spec.strategy.mlp == "ulysses"

    def plan(self) -> RankPlan:
        # Later layers are prefetched within the layer before; the first layer has none before it.
        return RankPlan(
            tuple(self._enter()),
            (StartHistory(ahead=False),),
            (*self._attention(), *self._mlp()) if self._cut else (self._whole_layer(),),
            tuple(self._leave()),
            not self._index and bool(self._chunk.wanted),
        )

    def _enter(self) -> list[Step]:
        if not self._cut:
            return [EmbedTokens(ROWS, self._region)]
        return [EmbedTokens("embedded", self._region), self._exchanges.scatter("embedded", ROWS)]

    def _whole_layer(self) -> Step:
        """Return a decoder layer with its attention replaced: at tp 1 only attention communicates."""
        rows = self._chunk.rows[self._index]
        if not self._ulysses:
            return WholeLayer(rows, "heads", "mixed", tuple(self._ring("heads", "mixed")))
        to_heads, to_rows = (
            self._exchanges.to_heads("all heads", "heads"),
            self._exchanges.to_rows("mixed", "all mixed"),
        )
        return WholeLayer(rows, "all heads", "all mixed", (to_heads, *self._ring("heads", "mixed"), to_rows))

    def _attention(self) -> list[Step]:
        steps: list[Step] = []
        if self._whole_mlp:
            steps.append(StartWeights(gathered_weights(self._chunk.config, self._group, self._index)))
        return [
            *steps,
            NormRows("attention", ROWS, "normed"),
            self._exchanges.gather("normed", "region's normed"),
            ProjectHeads("region's normed", "heads", self._region),
            *self._ring("heads", "mixed"),
            ProjectOutput("mixed", "sums"),
            self._exchanges.scatter("sums", "change"),
            AddRows("change"),
        ]

    def _ring(self, source: str, target: str) -> list[Step]:
        chunk, width, ranks = self._chunk, self._spec.width, self._group.ranks
        member, part = divmod(self._index, width)
        members = self._spec.members
        # The ranks of a member hold the same tokens: its first rank's count stands for all.
        past = [len(chunk.history[ranks[i * width]].positions) for i in range(members)]
        if self._spec.in_place and members > 1:
            rows = tuple(
                MemberRows(
                    ranks[i * width + part],
                    len(chunk.fresh[i]),
                    mask_blocks(chunk.fresh[i], chunk.fresh[member], past[member]),
                    bool(mask_blocks(chunk.fresh[member], chunk.fresh[i], past[i])),
                )
                for i in range(members)
            )
            in_place = AttendInPlace(source, target, rows, past[member])
            return [in_place] if chunk.stays else [FinishHistory(), in_place, StartHistory(ahead=True)]
        # Ring neighbours are the ranks with the same part, hence the same heads, of the neighbouring members.
        before, behind = (ranks[(member + by) % members * width + part] for by in (-1, 1))
        attend = RingAttend(source, target, ring(member, chunk.fresh, past), past[member], before, behind)
        return [FinishHistory(), attend, StartHistory(ahead=True)]

    def _mlp(self) -> list[Step]:
        normed = NormRows("mlp", ROWS, "normed")
        if self._whole_mlp:
            return [normed, FinishWeights(), FeedForward("normed", "change", True), AddRows("change")]
        return [
            normed,
            self._exchanges.gather("normed", "region's normed"),
            FeedForward("region's normed", "sums", False),
            self._exchanges.scatter("sums", "change"),
            AddRows("change"),
        ]

    def _leave(self) -> list[Step]:
        if not self._chunk.wanted:
            return []
        steps: list[Step] = [self._exchanges.last_rows("last", self._chunk.wanted)]
        if self._index in self._group.region(0):
            steps += [NormRows("final", "last", "normed"), ComputeLogits("normed", "words")]
            steps.append(self._exchanges.logits("words", LOGITS, len(self._chunk.wanted)))
        return steps
