"""The ranks of one chunk, and how its attention is cut over them. Pure data."""

from __future__ import annotations

import msgspec

from headway.core.errors import ConfigError
from headway.core.span import Strategy
from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.shard import ModelShard, divides
from headway.runtime.sequence_parallel.tokens import ORDERS, Order


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

    Strategies: `ulysses` is Ulysses. `ring`, `megatron` and `local` are one form: activations are gathered within a TP
    region and KV is passed round a ring of regions. Nothing is gathered at tp 1, and nothing is passed with one region.
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
    """Of an in-place chunk: the ranks on which KV stays, the group's first among them; KV of the others is moved to
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
        for name, ranks in (("tp", self.group.tp), ("ulysses", self.width)):
            if not divides(config, ranks):
                raise ConfigError(
                    f"{name} over {ranks} ranks: must divide {config.q_heads} query heads, and divide or be a multiple "
                    f"of {config.kv_heads} KV heads"
                )

    def heads(self, index: int) -> ModelShard:
        """The heads that the rank at `index` attends with, as a shard of the whole model."""
        return ModelShard(index % self.width, self.width)
