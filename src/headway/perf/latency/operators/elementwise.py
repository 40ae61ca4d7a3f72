"""Norms, rotary embedding, activation, residual additions, embedding look-up: cost by tokens and elements a row."""

from __future__ import annotations

import msgspec
import numpy as np

from headway.perf.latency.operators.curves import Column, SizeCurve

OPS = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add", "emb")


class ElementwiseFit(msgspec.Struct, frozen=True):
    """Fitted elementwise operators of one die."""

    curves: dict[str, dict[str, SizeCurve]]
    """`curves[op][width]`: ms by tokens; width: elements a row."""

    def ms(self, op: str, tokens: Column, width: int) -> Column:
        """Return the milliseconds of `op` on `tokens` rows of `width` elements.

        A width between two measured ones is interpolated (log time over log width); outside the measured widths, rows
        are converted to rows of the nearest one with the same number of elements."""
        known = self.curves[op]
        if str(width) in known:
            return known[str(width)](tokens)
        widths = np.array(sorted(int(w) for w in known))
        at = int(np.searchsorted(widths, width))
        if at in (0, widths.size):
            # At least one row of the measured width: below it lies only the fixed cost.
            edge = int(widths[min(at, widths.size - 1)])
            return known[str(edge)](np.maximum(tokens * width / edge, 1.0))
        low, high = int(widths[at - 1]), int(widths[at])
        share = (np.log(width) - np.log(low)) / (np.log(high) - np.log(low))
        both = (1 - share) * np.log(known[str(low)](tokens)) + share * np.log(known[str(high)](tokens))
        return np.asarray(np.exp(both), dtype=np.float64)
