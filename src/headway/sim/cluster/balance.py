"""Cost of balancing KV inside a prefill: bytes, and the seconds that layer-wise overlap does not hide (Tetris §4.1).

Before a chunk computes on a larger group, the KV of earlier chunks is spread evenly over that group. While the fully
connected part of a layer computes, which needs no KV, the next layer's KV moves. Exposed are the transfer of the first
layer, and of every other layer the time by which its transfer exceeds that part.
"""

from __future__ import annotations

from headway.perf.hardware.links import NetworkLink
from headway.perf.hardware.shapes import ModelShape

CONNECTED_SHARE = 0.5
"""Assumed share of the fully connected part in a layer's time: attention takes as long."""


def balance_bytes(shape: ModelShape, past: int, before: int, after: int) -> float:
    """Return the bytes that each new instance receives when a group grows from `before` to `after` instances.

    `past`: tokens of earlier chunks, evenly spread over the `before` instances.
    """
    if after <= before or not past:
        return 0.0
    return past * shape.kv_bytes_per_token / after


def exposed_s(shape: ModelShape, link: NetworkLink, past: int, before: int, after: int, chunk_s: float) -> float:
    """Return the seconds that balancing adds to a chunk of `chunk_s` seconds.

    The senders are the limit: `before` instances send what `after - before` receive.
    """
    count = balance_bytes(shape, past, before, after)
    if not count:
        return 0.0
    per_layer = count * max(1.0, (after - before) / before) / shape.layers
    move_s = link.transfer_s(int(per_layer))
    hidden_s = CONNECTED_SHARE * chunk_s / shape.layers
    # nothing hides the first layer's transfer
    return move_s + (shape.layers - 1) * max(0.0, move_s - hidden_s)
