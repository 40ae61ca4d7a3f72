"""Points at which a running span can be paused: after each layer of each of its pieces (`core.span.cut`).

A span takes the time predicted for it as a whole, however it is cut into pieces. A piece's part of that time is its
share of the sum of all pieces' predicted times; all layers of a piece take equally long. Used by the simulator, the
live controller and policies. A span that is not cut can be paused after each layer (PecSched §5.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from headway.core.span import cut
from headway.perf.latency.groups import GroupLatency, GroupShape


class PausePoints:
    """Pause points of one span."""

    __slots__ = ("layers", "pieces", "shares")

    def __init__(self, pieces: tuple[tuple[int, int], ...], seconds: Callable[[int, int], float], layers: int) -> None:
        """seconds: predicted time of tokens [start, end) alone; called only if there are several pieces."""
        # Tokens [start, end) of each piece; pieces are computed one after another, each through all layers.
        self.pieces = pieces
        self.layers = layers
        # Each piece's share of the span's time; they sum to 1.
        self.shares: tuple[float, ...] = (1.0,)
        if len(pieces) > 1:
            alone_s = [seconds(start, end) for start, end in pieces]
            total_s = sum(alone_s)
            self.shares = tuple(one_s / total_s if total_s > 0 else 1.0 / len(pieces) for one_s in alone_s)

    @property
    def widest_gap(self) -> float:
        """The largest share of the span's time between two neighbouring pause points."""
        return max(self.shares) / self.layers

    def elapsed_share(self, tokens: int, layer: int) -> float:
        """Return the share of the span's time before `layer` of the piece that begins at token `tokens`. Raises
        ValueError if no piece begins there."""
        before = 0.0
        for (start, _), share in zip(self.pieces, self.shares, strict=True):
            if start == tokens:
                return before + share * layer / self.layers
            before += share
        raise ValueError(f"no piece of {self.pieces} begins at {tokens}")

    def next_point(self, tokens: int, layer: int, seconds: float, whole_s: float) -> tuple[float, int, int]:
        """Return the first pause point at least `seconds` after the one at (tokens, layer).

        The result is (seconds until it, first token of its piece, layer). whole_s: time of the whole span. The point
        after the last layer of a piece is the start of the next piece; of the last piece it is the end of the span.
        Raises ValueError if no piece begins at `tokens`."""
        passed_s, last = 0.0, len(self.pieces) - 1
        for number, ((start, _), share) in enumerate(zip(self.pieces, self.shares, strict=True)):
            if start < tokens:
                continue
            layer_s = whole_s * share / self.layers
            begun = layer if start == tokens else 0
            # Whole layers of this piece until then; 1e-9 keeps a time exactly at a layer's end from rounding up.
            done = math.ceil((seconds - passed_s) / layer_s - 1e-9) if layer_s > 0 else 0
            # At the last layer's end of a piece that is not the last, go on: that point is layer 0 of the next piece.
            if begun + done < self.layers or number == last:
                at = min(self.layers, begun + max(0, done))
                return passed_s + (at - begun) * layer_s, start, at
            passed_s += (self.layers - begun) * layer_s
        raise ValueError(f"no piece of {self.pieces} begins at {tokens}")


def pause_points_of(
    latency: GroupLatency, start: int, end: int, group: GroupShape, rows: int, layers: int
) -> PausePoints:
    """Return the pause points of tokens [start, end) on a group.

    rows: most rows that an instance computes at once; 0: all."""
    pieces = cut(start, end, group.sp, rows)
    return PausePoints(pieces, lambda a, b: latency.prefill_s(a, b - a, group), layers)
