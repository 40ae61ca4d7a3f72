"""Layers of interrupted chunks in a simulated engine: how far each is computed, and when an arrival stops one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.core.batch import Batch, Chunk


@dataclass(frozen=True)
class ChunkInProgress:
    """A chunk in a batch of its own. Each of its layers takes the same part of `whole_s`."""

    chunk: Chunk
    began_s: float
    """Virtual seconds at which its batch began, or is as if it had: with the layers that were computed before."""
    whole_s: float
    """Seconds of all layers."""


class InterruptedChunks:
    """Chunks of interruptible batches of one simulated engine: the one that runs, and those that were interrupted."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._running: tuple[int, ChunkInProgress] | None = None
        # By request: the chunk, seconds that its completed layers took, and seconds of all.
        self._kept: dict[str, tuple[Chunk, float, float]] = {}

    def begin(self, batch: Batch, now: float, whole_s: float) -> tuple[float, float]:
        """Return the seconds that a batch takes from `now` on, and those of its whole work.

        These are `whole_s`, but where it goes on with an interrupted chunk."""
        self._running = None
        for part in batch.parts if self._kept else ():
            for op in part.kv_ops:
                if op.verb == "free":
                    self._kept.pop(op.request, None)
        chunks = [chunk for part in batch.parts for chunk in part.prefills]
        kept = [self._kept.pop(chunk.request, None) for chunk in chunks] if self._kept else []
        if not batch.interruptible:
            return whole_s, whole_s
        (chunk,), done_s = chunks, 0.0
        if kept and kept[0] is not None and kept[0][0] == chunk:
            _, done_s, whole_s = kept[0]
        self._running = batch.id, ChunkInProgress(chunk, now - done_s, whole_s)
        return whole_s - done_s, whole_s

    def goes_on(self, batch: Batch) -> bool:
        """Whether a batch, which has not begun, goes on with an interrupted chunk."""
        chunks = [chunk for part in batch.parts for chunk in part.prefills]
        return batch.interruptible and self._kept.get(chunks[0].request, (None,))[0] == chunks[0]

    def interrupt(self, now: float) -> tuple[int, float] | None:
        """Return the batch that runs and when the layer ends in which it is: there it stops. None: none, or the last.

        Its completed layers are kept."""
        if self._running is None:
            return None
        batch_id, running = self._running
        layer_s = running.whole_s / self._layers
        # the layer that is being computed, counted from 1; one that ends now is completed
        layer = max(1, math.ceil((now - running.began_s) / layer_s - 1e-9))
        if layer >= self._layers:
            return None
        self._running = None
        self._kept[running.chunk.request] = running.chunk, layer * layer_s, running.whole_s
        return batch_id, max(now, running.began_s + layer * layer_s)

    def clear(self) -> None:
        """Forget all: the engine has lost its KV."""
        self._running = None
        self._kept.clear()
