"""Norms, rotary embedding, activation, residual additions, embedding look-up: cost by tokens and elements a row."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headway.perf.latency.operators.curves import SizeCurve, curve
from headway.perf.latency.operators.profiles import Column, OperatorProfile

OPS = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add", "emb")


class ElementwiseFit(msgspec.Struct, frozen=True):
    """`curves[op][width]`: ms by tokens."""

    curves: dict[str, dict[str, SizeCurve]]

    def ms(self, op: str, tokens: Column, width: int) -> Column:
        """Milliseconds. A width between two measured ones is interpolated (in logarithms, by width); one outside scales
        with the nearest beyond its floor."""
        known = self.curves[op]
        if str(width) in known:
            return known[str(width)](tokens)
        widths = np.array(sorted(int(w) for w in known))
        at = int(np.searchsorted(widths, width))
        if at in (0, widths.size):
            edge = int(widths[min(at, widths.size - 1)])
            return known[str(edge)](np.maximum(tokens * width / edge, 1.0))
        low, high = int(widths[at - 1]), int(widths[at])
        share = (np.log(width) - np.log(low)) / (np.log(high) - np.log(low))
        both = (1 - share) * np.log(known[str(low)](tokens)) + share * np.log(known[str(high)](tokens))
        return np.asarray(np.exp(both), dtype=np.float64)


def fit_elementwise(profiles: Sequence[OperatorProfile], tolerance: float = 0.0) -> ElementwiseFit:
    """One curve an operator and width, of all models that have it (median by tokens)."""
    points: dict[str, dict[int, dict[float, list[float]]]] = {}
    for p in profiles:
        for tokens, width, ms in zip(p.x["tokens"], p.x["width"], p.ms, strict=True):
            points.setdefault(p.op, {}).setdefault(int(width), {}).setdefault(float(tokens), []).append(float(ms))
    curves: dict[str, dict[str, SizeCurve]] = {}
    for op, widths in sorted(points.items()):
        for width, times in sorted(widths.items()):
            sizes = np.array(sorted(times))
            middle = np.array([float(np.median(times[s])) for s in sizes])
            curves.setdefault(op, {})[str(width)] = curve(sizes, middle, tolerance)
    return ElementwiseFit(curves)
