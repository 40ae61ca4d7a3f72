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
    """Return the rotary embedding of a config.json, from `rope_parameters`, or `rope_scaling` and `rope_theta`.

    Raises CheckpointError for a kind that is not one of `KINDS`, for a field of it that is missing or misshapen, and
    where both objects are given and do not mean the same.
    """
    given = [name for name in ("rope_parameters", "rope_scaling") if config.get(name)]
    found = [_read(config, config[name], head_dim, max_positions, origin) for name in given]
    if len(found) == 2 and found[0] != found[1]:
        raise CheckpointError(
            f"{origin}: 'rope_parameters' and 'rope_scaling' (with 'rope_theta') say different things: keep the one "
            "that the model was trained with"
        )
    return found[0] if found else _read(config, {}, head_dim, max_positions, origin)


def _read(config: Mapping[str, Any], raw: Any, head_dim: int, max_positions: int, origin: str) -> RopeConfig:
    """Return what one of the two objects says; the fields at the top level of config.json complete it."""
    top = JsonFields(config, origin)
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise CheckpointError(
            f"{origin}: rope parameters that differ by layer are not supported; one object for all is"
        )
    rope = JsonFields(raw, f"{origin} (rope parameters)")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    kinds: tuple[str, ...] = KINDS
    if config.get("model_type") == "phi3":
        kinds = ("default", "longrope")
        # Older Phi-3 files call LongRoPE "su" or "yarn".
        kind = "longrope" if kind in ("su", "yarn") else kind
    if kind not in kinds:
        raise CheckpointError(f"{origin}: rope type {kind!r} is not supported; supported are {', '.join(kinds)}")
    share = rope.number("partial_rotary_factor", top.number("partial_rotary_factor", 1.0))
    if share != 1.0 and config.get("model_type") != "phi3":
        raise CheckpointError(
            f"{origin}: 'partial_rotary_factor' is {share:g}, but only Phi-3 rotates a part of a head"
        )
    rotary_dim = int(head_dim * share)
    least = 4 if kind == "dynamic" else 2
    if rotary_dim < least or rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(
            f"{origin}: {rotary_dim} of {head_dim} head dimensions would rotate: must be even, {least} up"
        )
    original = max_positions
    if kind in ("llama3", "yarn", "longrope"):
        # Beside the parameters it counts more than in them; Phi-3 has it only there.
        at = top if top.has("original_max_position_embeddings") or config.get("model_type") == "phi3" else rope
        original = at.whole("original_max_position_embeddings", None if at is top else max_positions)
    factor = 1.0
    if kind != "default":
        null = kind == "yarn" and "factor" in raw
        factor = rope.number("factor", max_positions / original if kind == "longrope" or null else None)
    if factor <= 0:
        raise rope.wrong("factor", "a positive number")
    low, high = 1.0, 4.0
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not 0 < low < high:
            raise rope.wrong("high_freq_factor", f"above 'low_freq_factor' ({low:g})")
    half = rotary_dim // 2
    return RopeConfig(
        kind=kind,
        theta=rope.number("rope_theta", top.number("rope_theta", 10000.0)),
        rotary_dim=rotary_dim,
        original_max=original,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
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
