"""Ranks of an instance: T tensor-parallel ranks make a stage, S stages a group, K groups (KV parallelism) the instance.

Rank numbers run through tensor parallelism first, which talks most, then stages, then groups. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.perf.latency.layout import Layout
from headway.runtime.model.shard import Shard


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in a layout."""

    layout: Layout
    group: int
    stage: int
    tp: int

    @property
    def rank(self) -> int:
        return (self.group * self.layout.stages + self.stage) * self.layout.tp + self.tp

    @property
    def shard(self) -> Shard:
        """What it holds of the model. All groups hold the same."""
        return Shard(self.tp, self.layout.tp, self.stage, self.layout.stages)

    @property
    def draws(self) -> bool:
        """Whether this rank samples: the first of the last stage."""
        return self.stage == self.layout.stages - 1 and self.tp == 0

    @property
    def embeds(self) -> bool:
        """Whether this rank turns tokens into rows, and so must know them."""
        return self.stage == 0

    @property
    def drawer(self) -> Place:
        """The rank of this group that samples."""
        return Place(self.layout, self.group, self.layout.stages - 1, 0)

    @property
    def readers(self) -> tuple[Place, ...]:
        """The ranks of this group that must be told which tokens were drawn."""
        ranks = (Place(self.layout, self.group, 0, tp) for tp in range(self.layout.tp))
        return tuple(place for place in ranks if not place.draws)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """All ranks of this stage of this group, in order."""
        return tuple(Place(self.layout, self.group, self.stage, tp).rank for tp in range(self.layout.tp))

    def in_group(self, group: int) -> Place:
        """The rank with the same slice of the same stage in another group."""
        return Place(self.layout, group, self.stage, self.tp)

    def at_stage(self, stage: int) -> Place:
        """The rank with the same slice in another stage."""
        return Place(self.layout, self.group, stage, self.tp)


def place_of(layout: Layout, rank: int) -> Place:
    """The place of a rank number."""
    row, tp = divmod(rank, layout.tp)
    return Place(layout, *divmod(row, layout.stages), tp)


def places(layout: Layout) -> tuple[Place, ...]:
    """All ranks, in order."""
    return tuple(place_of(layout, rank) for rank in range(layout.accelerators))
