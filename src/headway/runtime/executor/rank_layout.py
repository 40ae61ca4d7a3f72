"""Ranks of an instance: T tensor-parallel ranks make a stage, S stages a group, K groups (KV parallelism) the instance.

Rank numbers run through tensor parallelism first, which talks most, then stages, then groups. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.perf.latency.layout import ParallelLayout
from headway.runtime.model.shard import ModelShard


@dataclass(frozen=True, slots=True)
class RankPosition:
    """One rank's place in a layout."""

    layout: ParallelLayout
    group: int
    stage: int
    tp: int

    @property
    def rank(self) -> int:
        return (self.group * self.layout.stages + self.stage) * self.layout.tp + self.tp

    @property
    def shard(self) -> ModelShard:
        """The part of the model that this rank holds. All groups hold the same parts."""
        return ModelShard(self.tp, self.layout.tp, self.stage, self.layout.stages)

    @property
    def draws(self) -> bool:
        """Whether this rank samples: the first of the last stage."""
        return self.stage == self.layout.stages - 1 and self.tp == 0

    @property
    def embeds(self) -> bool:
        """Whether this rank embeds tokens, and so needs their ids."""
        return self.stage == 0

    @property
    def drawer(self) -> RankPosition:
        """The rank of this group that samples."""
        return RankPosition(self.layout, self.group, self.layout.stages - 1, 0)

    @property
    def readers(self) -> tuple[RankPosition, ...]:
        """The ranks of this group that need the ids of sampled tokens."""
        ranks = (RankPosition(self.layout, self.group, 0, tp) for tp in range(self.layout.tp))
        return tuple(place for place in ranks if not place.draws)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """All ranks of this stage of this group, in order."""
        return tuple(RankPosition(self.layout, self.group, self.stage, tp).rank for tp in range(self.layout.tp))

    def in_group(self, group: int) -> RankPosition:
        """Return the rank with the same slice of the same stage in another group."""
        return RankPosition(self.layout, group, self.stage, self.tp)

    def at_stage(self, stage: int) -> RankPosition:
        """Return the rank with the same slice in another stage."""
        return RankPosition(self.layout, self.group, stage, self.tp)


def place_of(layout: ParallelLayout, rank: int) -> RankPosition:
    """Return the position of a rank number."""
    row, tp = divmod(rank, layout.tp)
    return RankPosition(layout, *divmod(row, layout.stages), tp)


def places(layout: ParallelLayout) -> tuple[RankPosition, ...]:
    """Return the positions of all ranks, in order."""
    return tuple(place_of(layout, rank) for rank in range(layout.accelerators))
