"""Where a span that is computed can be paused: behind each layer of each of its pieces (`core.span.cut`).

A span takes what it is predicted to take at once, whatever pieces it is cut into; what a piece takes of that is its
share of what all pieces are predicted to take alone. The simulator, timed instances, the router and policies all go by
this; where nothing is cut it is a layer's share of all layers (PecSched §5.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headway.core.span import cut
from headway.perf.latency.groups import GroupLatency, GroupShape


class PausePoints:
    """Of a span of tokens [start, end). `pieces`: as they are computed, each through all `layers`; `shares`: of the
    span's time, of each piece."""

    __slots__ = ("layers", "pieces", "shares")

    def __init__(self, pieces: tuple[tuple[int, int], ...], seconds: Callable[[int, int], float], layers: int) -> None:
        """seconds: what tokens [start, end) take alone, asked only where there are several pieces."""
        self.pieces, self.layers = pieces, layers
        self.shares: tuple[float, ...] = (1.0,)
        if len(pieces) > 1:
            alone_s = [seconds(start, end) for start, end in pieces]
            total_s = sum(alone_s)
            self.shares = tuple(one_s / total_s if total_s > 0 else 1.0 / len(pieces) for one_s in alone_s)

    @property
    def widest(self) -> float:
        """The largest share of the span's time between two edges."""
        return max(self.shares) / self.layers

    def over(self, tokens: int, layer: int) -> float:
        """The share of the span's time that is over before `layer` of the piece that begins with token `tokens`."""
        before = 0.0
        for (start, _), share in zip(self.pieces, self.shares, strict=True):
            if start == tokens:
                return before + share * layer / self.layers
            before += share
        raise ValueError(f"no piece of {self.pieces} begins at {tokens}")

    def next(self, tokens: int, layer: int, seconds: float, whole_s: float) -> tuple[float, int, int]:
        """The first edge at least so many seconds behind another one: (seconds until then, first token of its piece,
        layer). whole_s: what all of the span takes. What is behind the last layer of a piece is the next one's start,
        of the last piece its end."""
        passed_s, last = 0.0, len(self.pieces) - 1
        for number, ((start, _), share) in enumerate(zip(self.pieces, self.shares, strict=True)):
            if start < tokens:
                continue
            layer_s = whole_s * share / self.layers
            begun = layer if start == tokens else 0
            done = math.ceil((seconds - passed_s) / layer_s - 1e-9) if layer_s > 0 else 0
            if begun + done < self.layers or number == last:
                at = min(self.layers, begun + max(0, done))
                return passed_s + (at - begun) * layer_s, start, at
            passed_s += (self.layers - begun) * layer_s
        raise ValueError(f"no piece of {self.pieces} begins at {tokens}")


def edges_of(latency: GroupLatency, start: int, end: int, group: GroupShape, rows: int, layers: int) -> PausePoints:
    """Of tokens [start, end) on a group, at most `rows` rows of an instance at once (0: all)."""
    pieces = cut(start, end, group.sp, rows)
    return PausePoints(pieces, lambda a, b: latency.prefill_s(a, b - a, group), layers)
