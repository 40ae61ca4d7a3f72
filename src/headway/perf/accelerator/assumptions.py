"""Assumptions that the paper does not state, as named fields, and two presets.

`default`: the real model, with times from the mapping search. `paper`: the set that reproduces the paper's stage
figures (docs/papers/accelerator.md): a feed-forward layer of two matrices, no LM head, attention that is not causal,
units at a constant share of their peak, and 128 rows of a packed product for a decode batch.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headway.core.errors import ConfigError

Unit = Literal["vector", "array", "fastest"]


class AcceleratorAssumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Assumptions of the operator model; `WORDS` describes each field (docs/reference/accelerator-assumptions.md)."""

    preset: str = "default"
    ffn_matrices: int | None = None
    lm_head: bool = True
    causal: bool = True
    mapper: bool = True
    utilisation: float = 1.0
    decode_rows: int | None = None
    decode_attention: Unit = "fastest"
    kv_reread: bool = False
    decode_kv_written: bool = True
    prefetch_in_attention: bool = True
    across_iterations: bool = False
    ahead_bytes: int = 0
    softmax_ops: float = 5.0
    elementwise_ops: float = 4.0

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"assumptions.{name} must be {rule}, not {getattr(self, name)!r}")

        need(self.ffn_matrices in (None, 2, 3), "ffn_matrices", "2, 3 or null (the model's own)")
        need(0 < self.utilisation <= 1, "utilisation", "above 0 and at most 1")
        need(self.decode_rows is None or self.decode_rows >= 1, "decode_rows", "at least 1, or null (one a decode)")
        need(self.decode_attention in ("vector", "array", "fastest"), "decode_attention", "vector, array or fastest")
        for name in ("ahead_bytes", "softmax_ops", "elementwise_ops"):
            need(getattr(self, name) >= 0, name, "0 or more")


WORDS: dict[str, str] = {
    "ffn_matrices": "matrices of the feed-forward layer; null: the model's own (3 with a gate)",
    "lm_head": "the LM head runs once an iteration, for each row that yields a token",
    "causal": "a chunk attends to itself causally; else to the full square",
    "mapper": "times and HBM bytes come from the mapping search; else units run at `utilisation` of their peak",
    "utilisation": "share of peak that arrays and vector unit reach without the mapper",
    "decode_rows": "rows that a decode batch adds to a product, whatever its size; null: one a decode",
    "decode_attention": "unit that attends for decodes: vector, array, or the fastest",
    "kv_reread": "a chunk's new KV is read back from HBM by its own attention; else it is only written",
    "decode_kv_written": "the KV of decoded tokens is written to HBM (it always is; the paper's figures leave it out)",
    "prefetch_in_attention": "KV is prefetched during prefill attention too; else only beside products",
    "across_iterations": "the first layer's KV was prefetched by the iteration before; else its window is only its own",
    "ahead_bytes": "KV that the operand buffer holds ahead of decode attention without a prefetch buffer",
    "softmax_ops": "vector operations a score in prefill attention, beside the arrays",
    "elementwise_ops": "vector operations an element of norms, rotations, activations and residuals",
}

PRESETS: dict[str, AcceleratorAssumptions] = {
    "default": AcceleratorAssumptions(),
    "paper": AcceleratorAssumptions(
        preset="paper",
        ffn_matrices=2,
        lm_head=False,
        causal=False,
        mapper=False,
        utilisation=0.9755,
        decode_rows=128,
        decode_attention="vector",
        kv_reread=True,
        decode_kv_written=False,
        prefetch_in_attention=True,
        across_iterations=True,
        ahead_bytes=4 << 20,
        softmax_ops=0.0,
        elementwise_ops=0.0,
    ),
}


def assumptions(preset: str = "default", **changes: Any) -> AcceleratorAssumptions:
    """Return a preset with some fields changed. Raises ConfigError, listing valid names, for an unknown one."""
    if preset not in PRESETS:
        raise ConfigError(f"assumptions.preset must be one of {', '.join(PRESETS)}, not {preset!r}")
    for name in changes:
        if name not in WORDS:
            raise ConfigError(f"assumptions.{name} is not a field; allowed here: preset, {', '.join(WORDS)}")
    return msgspec.structs.replace(PRESETS[preset], **changes)
