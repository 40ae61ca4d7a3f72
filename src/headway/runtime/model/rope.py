"""Rotary position embedding: the frequencies of every scaling rule, and the rotation itself.

Frequencies and angles are float64: in float32 the product of a position and a frequency is off by up to 0.03 rad at 1M
tokens and 0.25 rad at 10M.

Frequencies are fixed once, from `max_model_len`. `dynamic` and `longrope` otherwise depend on the current length, so
that a prompt computed in chunks would differ from the same prompt computed at once. Both then equal transformers
wherever its own sequence implies the same choice: `dynamic` at lengths up to the original one when max_model_len does
not exceed it, `longrope` with its short factors when max_model_len is within the original length, long ones beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headway.runtime.model.rope_config import RopeConfig


class RotaryTable(NamedTuple):
    """Cosines and signed sines of one iteration's rows: each (T, 1, rotary_dim), in the activations' type.

    The first half of `sin` is negated, so that rotation is x · cos + swap_halves(x) · sin.
    """

    cos: Tensor
    sin: Tensor


class RotaryEmbedding:
    """The rotation of one model. Holds rotary_dim / 2 frequencies; angles are computed per iteration, in float64."""

    def __init__(self, config: RopeConfig, max_model_len: int, device: torch.device | str = "cpu") -> None:
        frequencies, self.scaling = frequencies_of(config, max_model_len)
        self.frequencies = frequencies.to(device)

    def table(self, positions: Tensor, dtype: torch.dtype) -> RotaryTable:
        """Return the table of (T,) int64 positions. Called once an iteration."""
        angles = positions.to(torch.float64).unsqueeze(1) * self.frequencies
        cos, sin = torch.cos(angles) * self.scaling, torch.sin(angles) * self.scaling
        return RotaryTable(
            torch.cat((cos, cos), dim=1).to(dtype).unsqueeze(1), torch.cat((-sin, sin), dim=1).to(dtype).unsqueeze(1)
        )


def rotate_(heads: Tensor, table: RotaryTable) -> Tensor:
    """Rotate (T, heads, head_dim) in place; dimensions beyond the rotary ones stay as they are."""
    dim = table.cos.shape[-1]
    turned = heads if dim == heads.shape[-1] else heads[..., :dim]
    swapped = torch.cat((turned[..., dim // 2 :], turned[..., : dim // 2]), dim=-1)
    # `swapped` is a copy, taken before the multiplication overwrites its source.
    turned.mul_(table.cos).addcmul_(swapped, table.sin)
    return heads


def frequencies_of(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Return angular frequencies (rotary_dim / 2,) float64 in radians a token, and the factor on cosines and sines."""
    return _RULES[config.kind](config, max_model_len)


def _periods(config: RopeConfig, theta: float) -> Tensor:
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
    return torch.as_tensor(theta, dtype=torch.float64) ** exponents


def _default(config: RopeConfig, _: int) -> tuple[Tensor, float]:
    return 1.0 / _periods(config, config.theta), 1.0


def _linear(config: RopeConfig, _: int) -> tuple[Tensor, float]:
    return 1.0 / _periods(config, config.theta) / config.factor, 1.0


def _dynamic(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """NTK-aware scaling: the base grows with max_model_len / original length, so that the slowest wave still fits."""
    stretch = config.factor * max(max_model_len, config.original_max) / config.original_max - (config.factor - 1)
    theta = config.theta * stretch ** (config.rotary_dim / (config.rotary_dim - 2))
    return 1.0 / _periods(config, theta), 1.0


def _llama3(config: RopeConfig, _: int) -> tuple[Tensor, float]:
    """Keep fast waves, divide slow ones by the factor, blend those between by their turns per original length."""
    plain = 1.0 / _periods(config, config.theta)
    # Turns within the original length: length / wavelength, the wavelength being 2 pi / frequency.
    turns = config.original_max * plain / (2 * math.pi)
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / config.factor + blend * plain, 1.0


def _yarn(config: RopeConfig, _: int) -> tuple[Tensor, float]:
    """Like llama3 with a ramp over dimensions between beta_fast and beta_slow turns, and sharpened attention."""
    plain = 1.0 / _periods(config, config.theta)
    low, high = _turns_to_dim(config, config.beta_fast), _turns_to_dim(config, config.beta_slow)
    if config.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, config.rotary_dim - 1.0)
    # 0.001 avoids a division by zero where the ramp has no width, as in the reference implementation.
    ramp = (torch.arange(config.rotary_dim // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0.0, 1.0)
    return plain / config.factor * (1 - kept) + plain * kept, _yarn_scaling(config)


def _turns_to_dim(config: RopeConfig, turns: float) -> float:
    """Return the (fractional) dimension whose wave makes that many turns within the original length."""
    return config.rotary_dim * math.log(config.original_max / (turns * 2 * math.pi)) / (2 * math.log(config.theta))


def _yarn_scaling(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    log = math.log(config.factor) if config.factor > 1 else 0.0
    if config.mscale and config.mscale_all_dim:
        return (0.1 * config.mscale * log + 1.0) / (0.1 * config.mscale_all_dim * log + 1.0)
    # YaRN's attention temperature: 0.1 ln(s) + 1 on both queries and keys (Peng et al. 2023, §3.4).
    return 0.1 * log + 1.0


def _longrope(config: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Searched factors per dimension: one list within the original length, another beyond."""
    factors = config.long_factor if max_model_len > config.original_max else config.short_factor
    scaling = config.attention_factor
    if scaling is None:
        # sqrt(1 + ln(s) / ln(original length)), of the LongRoPE reference.
        growth = math.log(config.factor) / math.log(config.original_max) if config.factor > 1 else 0.0
        scaling = math.sqrt(1 + growth)
    return 1.0 / (torch.tensor(factors, dtype=torch.float64) * _periods(config, config.theta)), scaling


_RULES: dict[str, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
