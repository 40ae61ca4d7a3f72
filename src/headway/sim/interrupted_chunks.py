"""Layers of interrupted chunks in a simulated engine: how far each is computed, and when an arrival stops one."""

from __future__ import annotations

import math
from typing import NamedTuple

from headway.core.batch import Batch, Chunk


class ComputedLayers(NamedTuple):
    """How far a chunk is. Each of its layers takes the same part of `whole_s`."""

    chunk: Chunk
    done_s: float
    """Seconds that the layers which are computed took."""
    whole_s: float
    """Seconds of all layers."""


class InterruptedChunks:
    """Chunks of interruptible batches of one simulated engine: the one that runs, and those that were interrupted."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        # The batch that runs, when it began, and how far its chunk was then.
        self._running: tuple[int, float, ComputedLayers] | None = None
        self._kept: dict[str, ComputedLayers] = {}

    def begin(self, batch: Batch, now: float, whole_s: float) -> tuple[float, float]:
        """Return the seconds that a batch takes from `now` on, and those of its whole work.

        These are `whole_s`, but where it goes on with an interrupted chunk."""
        self._running = None
        for part in batch.parts if self._kept else ():
            for op in part.kv_ops:
                if op.verb == "free":
                    self._kept.pop(op.request, None)
        found = self._computed_of(batch)
        for chunk in (chunk for part in batch.parts for chunk in part.prefills):
            self._kept.pop(chunk.request, None)
        if not batch.interruptible:
            return whole_s, whole_s
        found = found or ComputedLayers(batch.parts[0].prefills[0], 0.0, whole_s)
        self._running = batch.id, now, found
        return found.whole_s - found.done_s, found.whole_s

    def goes_on(self, batch: Batch) -> bool:
        """Whether a batch, which has not begun, goes on with an interrupted chunk."""
        return self._computed_of(batch) is not None

    def _computed_of(self, batch: Batch) -> ComputedLayers | None:
        if not batch.interruptible:
            return None
        (chunk,) = batch.parts[0].prefills
        found = self._kept.get(chunk.request)
        return found if found is not None and found.chunk == chunk else None

    def interrupt(self, now: float) -> tuple[int, float] | None:
        """Return the batch that runs and when the layer ends in which it is: there it stops. None: none, or the last.

        Its completed layers are kept."""
        if self._running is None:
            return None
        batch_id, began_s, was = self._running
        layer_s = was.whole_s / self._layers
        # the layer that is being computed, counted from 1; one that ends now is completed
        layer = max(1, math.ceil((was.done_s + now - began_s) / layer_s - 1e-9))
        if layer >= self._layers:
            return None
        self._running = None
        self._kept[was.chunk.request] = was._replace(done_s=layer * layer_s)
        return batch_id, max(now, began_s + layer * layer_s - was.done_s)

    def clear(self) -> None:
        """Forget all: the engine has lost its KV."""
        self._running = None
        self._kept.clear()
