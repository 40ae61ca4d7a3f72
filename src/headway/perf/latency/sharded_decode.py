"""Decode latency on a group of instances that each hold a share of every request's KV.

Every member reads the weights, and all read their KV shares at once; in every layer the query goes out and partial
outputs return and are merged by log-sum-exp (PecSched Fig. 7, Medha §3.3): two messages whose bytes are negligible.

With several masters (LoongServe §4.2) each master computes the linear layers of its share of the requests and stores
their new KV; a single master computes those of all requests.
"""

from __future__ import annotations

import numpy as np

from headway.perf.hardware.links import NetworkLink
from headway.perf.latency.base import BatchLoad, LatencyModel, Seconds


class ShardedDecode(LatencyModel):
    """`LatencyModel` of a group that decodes together, from the model of one member."""

    def __init__(self, member: LatencyModel, members: int, layers: int, link: NetworkLink, masters: int = 1) -> None:
        """link: the slowest one between members."""
        self._member, self._members, self._masters = member, members, masters
        self._exchange_s = 2 * layers * link.latency_s if members > 1 else 0.0

    def token_s(self, first: int, last: int) -> Seconds:
        """See LatencyModel."""
        if self._masters == 1:
            return self._member.token_s(first, last)
        # Rows of the fullest master, which sets the time; the member's table is read once for all shares.
        shares = -(-np.arange(first, last + 1) // self._masters)
        seconds: Seconds = self._member.token_s(int(shares[0]), int(shares[-1]))[shares - shares[0]]
        return seconds

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        """See LatencyModel. (The first iteration of a decode is a chunk of one token.)"""
        return self._member.chunk_s(past // self._members, first, last) + self._exchange_s

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        """See LatencyModel."""
        return self._member.decode_s(decodes, -(-kv_sum // self._members)) + self._exchange_s

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """Ignore the measurement: this model does not learn."""
