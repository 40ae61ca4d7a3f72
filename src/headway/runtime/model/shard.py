"""Which part of a model one rank holds: a range of layers, and a slice of heads, of the MLP and of the vocabulary.

Megatron's cut (Shoeybi et al. 2019, §3): q, k, v, gate and up by rows of their weights, o and down by columns, so that
a layer needs two sums over the ranks and nothing else. Where there are more ranks than KV heads, a KV head is copied to
each rank whose query heads read it. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway.runtime.model.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class ModelShard:
    """Rank `rank` of `ranks` in tensor parallelism, stage `stage` of `stages`. The default is the whole model."""

    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: int = 1

    @property
    def first(self) -> bool:
        """Whether this stage turns tokens into rows."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage turns rows into logits."""
        return self.stage == self.stages - 1

    def layers(self, config: DecoderConfig) -> range:
        """The layers of this stage. Where they do not divide, the first stages have one more: the last has the head."""
        each, more = divmod(config.layers, self.stages)
        start = self.stage * each + min(self.stage, more)
        return range(start, start + each + (self.stage < more))

    def q_heads(self, config: DecoderConfig) -> range:
        return self._even(config.q_heads)

    def kv_heads(self, config: DecoderConfig) -> range:
        """The KV heads that this rank's query heads read."""
        group = config.q_heads // config.kv_heads
        heads = self.q_heads(config)
        return range(heads.start // group, (heads.stop - 1) // group + 1)

    def mlp(self, config: DecoderConfig) -> range:
        return self._even(config.mlp_size)

    def vocabulary(self, config: DecoderConfig) -> range:
        return self._even(config.vocab_size)

    def vocabularies(self, config: DecoderConfig) -> Sequence[range]:
        """Every rank's slice of the vocabulary, in order."""
        return [replace(self, rank=rank).vocabulary(config) for rank in range(self.ranks)]

    def local(self, config: DecoderConfig) -> DecoderConfig:
        """The decoder as this rank computes it: its heads and MLP width. Layers and vocabulary stay the model's."""
        return replace(
            config,
            q_heads=len(self.q_heads(config)),
            kv_heads=len(self.kv_heads(config)),
            mlp_size=len(self.mlp(config)),
        )

    def _even(self, size: int) -> range:
        return range(self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks)


WHOLE = ModelShard()


def divides(config: DecoderConfig, ranks: int) -> bool:
    """Whether heads can be cut over so many ranks: every rank has as many query heads, reading as many KV heads."""
    if config.q_heads % ranks:
        return False
    return config.kv_heads % ranks == 0 or ranks % config.kv_heads == 0
