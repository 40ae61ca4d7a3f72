"""Plan of one chunk on every rank: its rows, the layout of its KV, and the steps of a layer. Pure data.

The four combinations of fast SP (PecSched §5.3) differ in nothing but these lists. Each rank keeps a slice of the rows
of its ring member, the member's ranks being a TP region or, under Ulysses, a node.

attention, Megatron form   gather rows in the region, own heads of them, ring between regions, scatter the sums
attention, Ulysses         whole weights, all heads of own rows, all-to-all to own heads, ring between nodes, all-to-all
MLP, Megatron form         gather rows in the region, own slice of the MLP, scatter the sums
MLP, Ulysses               whole weights, own rows

Weights begin to travel one stage ahead; KV of earlier chunks begins to move for the next layer once the ring of this
one is done (Tetris §4.1), so that both overlap with linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headway.core.errors import ConfigError
from headway.runtime.model.config import DecoderConfig
from headway.runtime.sequence_parallel.exchanges import ChunkExchanges
from headway.runtime.sequence_parallel.gather_weights import gathered_weights
from headway.runtime.sequence_parallel.group import ChunkSpec
from headway.runtime.sequence_parallel.layout import KvLayout, KvMove, extended, fits, history_of, moves
from headway.runtime.sequence_parallel.mask_blocks import mask_blocks
from headway.runtime.sequence_parallel.ring import ring
from headway.runtime.sequence_parallel.steps import (
    ROWS,
    AddRows,
    AttendInPlace,
    ComputeLogits,
    EmbedTokens,
    FeedForward,
    FinishHistory,
    FinishWeights,
    MemberRows,
    NormRows,
    ProjectHeads,
    ProjectOutput,
    RingAttend,
    StartHistory,
    StartWeights,
    Step,
    WholeLayer,
)
from headway.runtime.sequence_parallel.tokens import Positions, share, spread


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
        self._whole_attention = self._cut and self._ulysses
        self._whole_mlp = self._cut and self._spec.strategy.mlp == "ulysses"

    def plan(self) -> RankPlan:
        # Later layers are prefetched within the layer before; the first layer has none before it.
        fetch: list[Step] = [StartHistory(ahead=False)]
        if self._whole_attention:
            fetch.append(self._weights("attention", ahead=False))
        return RankPlan(
            tuple(self._enter()),
            tuple(fetch),
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
        steps: list[Step] = [self._weights("mlp", ahead=False)] if self._whole_mlp else []
        steps.append(NormRows("attention", ROWS, "normed"))
        if not self._ulysses:
            steps += self._gathered("normed")
            steps.append(ProjectHeads(self._name("normed"), "heads", self._region, False))
            steps += self._ring("heads", "mixed")
            steps.append(ProjectOutput("mixed", "change", False))
            steps += self._scattered("change")
            return [*steps, AddRows(self._name("change"))]
        # Whole weights and own rows only: no gather, but all-to-alls around the ring.
        steps += [FinishWeights(), ProjectHeads("normed", "all heads", self._chunk.rows[self._index], True)]
        steps.append(self._exchanges.to_heads("all heads", "heads"))
        steps += self._ring("heads", "mixed")
        steps.append(self._exchanges.to_rows("mixed", "all mixed"))
        return [
            *steps,
            ProjectOutput("all mixed", "change", True),
            AddRows("change"),
            self._weights("attention", ahead=True),
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
        steps: list[Step] = [NormRows("mlp", ROWS, "normed")]
        if self._whole_mlp:
            return [*steps, FinishWeights(), FeedForward("normed", "change", True), AddRows("change")]
        steps += self._gathered("normed")
        steps.append(FeedForward(self._name("normed"), "change", False))
        steps += self._scattered("change")
        return [*steps, AddRows(self._name("change"))]

    def _leave(self) -> list[Step]:
        if not self._chunk.wanted:
            return []
        steps: list[Step] = [self._exchanges.last_rows("last", self._chunk.wanted)]
        if self._index in self._group.region(0):
            steps += [NormRows("final", "last", "normed"), ComputeLogits("normed", "words")]
            steps.append(self._exchanges.logits("words", LOGITS, len(self._chunk.wanted)))
        return steps

    def _weights(self, stage: Literal["attention", "mlp"], ahead: bool) -> Step:
        return StartWeights(gathered_weights(self._chunk.config, self._group, self._index, stage), ahead)

    def _gathered(self, register: str) -> list[Step]:
        return [self._exchanges.gather(register, self._name(register))] if self._cut else []

    def _scattered(self, register: str) -> list[Step]:
        return [self._exchanges.scatter(register, self._name(register))] if self._cut else []

    def _name(self, register: str) -> str:
        """Return a register's name after the region's exchange, where there is one."""
        return f"region's {register}" if self._cut else register
