"""What one iteration computes, and the techniques that it may use."""

from __future__ import annotations

import msgspec

from headway.core.errors import ConfigError


class IterationWork(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill chunk of `prefill_tokens` over `prefill_past` cached tokens, beside `decodes` requests that read
    `kv_tokens` of KV together."""

    prefill_tokens: int = 0
    prefill_past: int = 0
    decodes: int = 0
    kv_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("prefill_tokens", "prefill_past", "decodes", "kv_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"stage.{name} must be 0 or more, not {getattr(self, name)}")
        if not self.prefill_tokens and not self.decodes:
            raise ConfigError("stage.prefill_tokens and stage.decodes are both 0: there is nothing to compute")
        if self.prefill_past and not self.prefill_tokens:
            raise ConfigError("stage.prefill_past needs prefill_tokens of at least 1")
        if self.kv_tokens < self.decodes:
            raise ConfigError(
                f"stage.kv_tokens must be at least 1 a decode ({self.decodes}), not {self.kv_tokens}: "
                "it is what they read together"
            )
        if self.kv_tokens and not self.decodes:
            raise ConfigError("stage.kv_tokens needs decodes of at least 1")

    @property
    def prefill_only(self) -> IterationWork:
        return msgspec.structs.replace(self, decodes=0, kv_tokens=0)

    @property
    def decode_only(self) -> IterationWork:
        return msgspec.structs.replace(self, prefill_tokens=0, prefill_past=0)


class TechniqueSet(msgspec.Struct, frozen=True, kw_only=True):
    """flash_attention: scores stay on chip. fusion: activations stay on chip where they fit ("auto") or never ("off").
    double_buffering: the next tile is loaded while this one is computed. (Packing and prefetch are compared, not set.)
    """

    flash_attention: bool = True
    fusion: str = "auto"
    double_buffering: bool = True

    def __post_init__(self) -> None:
        if self.fusion not in ("auto", "off"):
            raise ConfigError(f"techniques.fusion must be auto or off, not {self.fusion!r}")
