"""Parallel layout of an instance, and the part of a model that one rank of one pipeline stage holds and computes.

Tensor parallelism cuts heads and the MLP's width (a KV head is copied where there are more ranks than KV heads);
stages cut layers, the first ones taking one more where they do not divide, because the last also carries the LM head;
KV parallelism copies weights and cuts a request's cache, so it changes no shape here.
"""

from __future__ import annotations

import re

import msgspec

from headway.core.errors import ConfigError
from headway.perf.hardware import AcceleratorSpec, DecoderShape, ModelShape, NetworkLink, link


class ParallelLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Degrees of parallelism, and links in place of the accelerator's."""

    tp: int = 1
    """Tensor parallelism."""
    stages: int = 1
    """Pipeline parallelism."""
    kvp: int = 1
    """KV parallelism."""
    inside: str | None = None
    """Link inside a node; None: the accelerator's."""
    across: str | None = None
    """Link between nodes; None: the accelerator's."""

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("stages", self.stages), ("kvp", self.kvp)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")

    @property
    def name(self) -> str:
        """Name in profiles, such as tp8-pp2-kvp1."""
        return f"tp{self.tp}-pp{self.stages}-kvp{self.kvp}"

    @classmethod
    def named(cls, name: str) -> ParallelLayout:
        """Return the layout of a `name`, with the accelerator's links. Raises ConfigError for anything else."""
        found = re.fullmatch(r"tp(\d+)-pp(\d+)-kvp(\d+)", name)
        if found is None:
            raise ConfigError(f"layout {name!r}: must look like tp2-pp1-kvp1")
        tp, stages, kvp = map(int, found.groups())
        return cls(tp=tp, stages=stages, kvp=kvp)

    @property
    def accelerators(self) -> int:
        """Accelerators of one instance."""
        return self.tp * self.stages * self.kvp

    def inside_link(self, device: AcceleratorSpec) -> NetworkLink:
        return link(self.inside) if self.inside else device.inside

    def across_link(self, device: AcceleratorSpec) -> NetworkLink:
        return link(self.across) if self.across else device.across

    def stage_link(self, device: AcceleratorSpec) -> NetworkLink:
        """Return the link between stages: the node's own while all stages fit into one node."""
        return self.inside_link(device) if self.tp * self.stages <= device.per_node else self.across_link(device)


class RankShape(DecoderShape, frozen=True, kw_only=True):
    """Shape of one rank's part of one stage: `layers` are the stage's, heads and widths the rank's."""

    first: bool
    """The stage has the embedding."""
    last: bool
    """The stage has the LM head."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that this rank holds: layers, the embedding on the first stage, the LM head on the
        last."""
        # Tied or not, embedding and LM head are separate copies on their stages.
        tables = (int(self.first) + int(self.last)) * self.vocab * self.hidden
        return (self.layers * self.layer_parameters + tables) * self.dtype_bytes


def rank_shape(shape: ModelShape, layout: ParallelLayout, stage: int = 0) -> RankShape:
    """Return the shape of one rank of `stage` (counted from 0). Raises ConfigError when the layout does not divide the
    model."""
    if not 0 <= stage < layout.stages:
        raise ConfigError(f"stage {stage} of a layout with {layout.stages} stages (they count from 0)")
    if layout.stages > shape.layers:
        raise ConfigError(f"{layout.stages} stages for {shape.layers} layers: at most one stage a layer")
    if shape.q_heads % layout.tp:
        raise ConfigError(f"{shape.q_heads} query heads cannot be cut over {layout.tp} tensor-parallel ranks")
    # The first `more` stages take one layer more; the last stage has the LM head's work besides.
    each, more = divmod(shape.layers, layout.stages)
    return RankShape(
        layers=each + (1 if stage < more else 0),
        first=stage == 0,
        last=stage == layout.stages - 1,
        hidden=shape.hidden,
        q_heads=shape.q_heads // layout.tp,
        # Rounded up: at least one KV head a rank, copied where ranks outnumber KV heads.
        kv_heads=-(-shape.kv_heads // layout.tp),
        head_dim=shape.head_dim,
        mlp=-(-shape.mlp // layout.tp),
        mlp_matrices=shape.mlp_matrices,
        parallel_block=shape.parallel_block,
        vocab=-(-shape.vocab // layout.tp),
        dtype_bytes=shape.dtype_bytes,
    )
