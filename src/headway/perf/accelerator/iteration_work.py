"""Work of one iteration, and the techniques that it may use."""

from __future__ import annotations

import msgspec

from headway.core.errors import ConfigError


class IterationWork(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill chunk and the decodes batched with it. Raises ConfigError when empty or contradictory."""

    prefill_tokens: int = 0
    """Tokens of the chunk."""
    prefill_past: int = 0
    """Cached tokens before the chunk."""
    decodes: int = 0
    """Decoding requests."""
    kv_tokens: int = 0
    """KV tokens that all decodes read together."""

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
        """The chunk without decodes."""
        return msgspec.structs.replace(self, decodes=0, kv_tokens=0)

    @property
    def decode_only(self) -> IterationWork:
        """The decodes without the chunk."""
        return msgspec.structs.replace(self, prefill_tokens=0, prefill_past=0)


class TechniqueSet(msgspec.Struct, frozen=True, kw_only=True):
    """Techniques of the operators. (Packing and prefetch are modes of the timeline, not set here.)"""

    flash_attention: bool = True
    """Scores stay on chip."""
    fusion: str = "auto"
    """Activations stay on chip where they fit ("auto") or never ("off")."""
    double_buffering: bool = True
    """The next tile is loaded while one is computed."""

    def __post_init__(self) -> None:
        if self.fusion not in ("auto", "off"):
            raise ConfigError(f"techniques.fusion must be auto or off, not {self.fusion!r}")
