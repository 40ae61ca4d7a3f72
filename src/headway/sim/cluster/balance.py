"""What moving KV costs inside a prefill: bytes, and the seconds that layer-wise overlap does not hide (Tetris §4.1).

Before a chunk computes on a larger group, the KV of earlier chunks is spread evenly over that group. Layer by layer the
next layer's KV moves while this layer's fully connected part computes (it needs no KV); what is exposed is the first
layer's, and of every other layer what exceeds that part.
"""

from __future__ import annotations

from headway.perf.hardware.links import NetworkLink
from headway.perf.hardware.shapes import ModelShape

CONNECTED_SHARE = 0.5
"""Share of a layer's time that the fully connected part is taken to be, at least, where attention is as long."""


def balance_bytes(shape: ModelShape, past: int, before: int, after: int) -> float:
    """Bytes that each new instance of the group receives when it grows from `before` to `after` instances."""
    if after <= before or not past:
        return 0.0
    return past * shape.kv_bytes_per_token / after


def exposed_s(shape: ModelShape, link: NetworkLink, past: int, before: int, after: int, chunk_s: float) -> float:
    """Seconds that balancing adds to a chunk of `chunk_s` seconds.

    The senders are the limit: `before` instances send what `after - before` receive.
    """
    count = balance_bytes(shape, past, before, after)
    if not count:
        return 0.0
    per_layer = count * max(1.0, (after - before) / before) / shape.layers
    move_s = link.transfer_s(int(per_layer))
    hidden_s = CONNECTED_SHARE * chunk_s / shape.layers
    return move_s + (shape.layers - 1) * max(0.0, move_s - hidden_s)
