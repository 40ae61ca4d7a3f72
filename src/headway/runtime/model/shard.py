"""The part of a model that one rank holds: a range of layers, and slices of heads, MLP and vocabulary.

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
        """Whether this stage embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage computes logits."""
        return self.stage == self.stages - 1

    def layers(self, config: DecoderConfig) -> range:
        """Return this stage's layers. Where they do not divide evenly, the first stages have one more."""
        each, more = divmod(config.layers, self.stages)
        start = self.stage * each + min(self.stage, more)
        return range(start, start + each + (self.stage < more))

    def q_heads(self, config: DecoderConfig) -> range:
        return self._even(config.q_heads)

    def kv_heads(self, config: DecoderConfig) -> range:
        """Return the KV heads that this rank's query heads read."""
        group = config.q_heads // config.kv_heads
        heads = self.q_heads(config)
        # With more ranks than KV heads, several ranks hold the same KV head.
        return range(heads.start // group, (heads.stop - 1) // group + 1)

    def mlp(self, config: DecoderConfig) -> range:
        return self._even(config.mlp_size)

    def vocabulary(self, config: DecoderConfig) -> range:
        return self._even(config.vocab_size)

    def vocabularies(self, config: DecoderConfig) -> Sequence[range]:
        """Return every rank's slice of the vocabulary, in order."""
        return [replace(self, rank=rank).vocabulary(config) for rank in range(self.ranks)]

    def local(self, config: DecoderConfig) -> DecoderConfig:
        """Return the configuration with this rank's heads and MLP width. Layers and vocabulary are unchanged."""
        return replace(
            config,
            q_heads=len(self.q_heads(config)),
            kv_heads=len(self.kv_heads(config)),
            mlp_size=len(self.mlp(config)),
        )

    def _even(self, size: int) -> range:
        # Cuts by multiplication first: parts differ by at most one, and cover the whole.
        return range(self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks)


WHOLE = ModelShard()


def divides(config: DecoderConfig, ranks: int) -> bool:
    """Whether heads can be cut evenly over `ranks`: as many query heads, reading as many KV heads, on every rank."""
    if config.q_heads % ranks:
        return False
    return config.kv_heads % ranks == 0 or ranks % config.kv_heads == 0
