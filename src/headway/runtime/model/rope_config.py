"""Configuration of the position encoding, read from either spelling of a Hugging Face config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.core.errors import CheckpointError
from headway.runtime.model.fields import JsonFields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One model's rotary embedding. Fields that a kind does not use keep their defaults."""

    kind: str
    """One of `KINDS`."""
    theta: float
    rotary_dim: int
    """The leading dimensions of a head that rotate; even."""
    original_max: int
    """Tokens that the model was first trained with."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    """None: derived from `factor`."""
    short_factor: tuple[float, ...] = ()
    """rotary_dim / 2 numbers."""
    long_factor: tuple[float, ...] = ()
    """rotary_dim / 2 numbers."""


def read_rope(config: Mapping[str, Any], head_dim: int, max_positions: int, origin: str) -> RopeConfig:
    """Return the rotary embedding of a config.json, from `rope_parameters` or from `rope_theta` and `rope_scaling`.

    Raises CheckpointError for a kind that is not one of `KINDS`, or a field of it that is missing or misshapen.
    """
    top = JsonFields(config, origin)
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise CheckpointError(f"{origin}: rope parameters that differ by layer are not supported: {raw!r}")
    rope = JsonFields(raw, f"{origin} (rope parameters)")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    # Older Phi-3 files call LongRoPE "su" or "yarn".
    if kind == "su" or (kind == "yarn" and config.get("model_type") == "phi3"):
        kind = "longrope"
    if kind not in KINDS:
        raise CheckpointError(f"{origin}: rope type '{kind}' is not supported; supported are {', '.join(KINDS)}")
    share = rope.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(f"{origin}: {rotary_dim} of {head_dim} head dimensions would rotate: must be even, 2 up")
    original = rope.whole("original_max_position_embeddings", max_positions)
    if kind in ("llama3", "yarn", "longrope") and top.has("original_max_position_embeddings"):
        original = top.whole("original_max_position_embeddings")
    # transformers computes this kind from max_position_embeddings, whatever else the file states.
    if kind == "dynamic":
        original = max_positions
    factor = rope.number("factor", max_positions / original if kind in ("default", "yarn", "longrope") else None)
    if factor <= 0:
        raise rope.wrong("factor", "a positive number")
    half = rotary_dim // 2
    return RopeConfig(
        kind=kind,
        theta=rope.number("rope_theta", top.number("rope_theta", 10000.0)),
        rotary_dim=rotary_dim,
        original_max=original,
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if kind == "llama3" else 4.0),
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", True),
        mscale=rope.number("mscale", 0.0),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0),
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        short_factor=_factors(rope, "short_factor", half) if kind == "longrope" else (),
        long_factor=_factors(rope, "long_factor", half) if kind == "longrope" else (),
    )


def _factors(rope: JsonFields, name: str, count: int) -> tuple[float, ...]:
    values = rope.numbers(name)
    if len(values) != count:
        raise CheckpointError(f"{rope.origin}: '{name}' has {len(values)} numbers where {count} dimensions rotate")
    return values
