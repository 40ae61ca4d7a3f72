"""KV transfers between simulated instances: when each slice arrives by the links, and slices of paused spans."""

from __future__ import annotations

from collections.abc import Callable

from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.policy.placement.view import ClusterState
from headway.sim.cluster.spans import SimulatedSpan
from headway.sim.cluster.spec import ClusterSpec

FOREVER = float("inf")


class SimulatedTransfers:
    """Slices of KV under way between instances."""

    def __init__(self, spec: ClusterSpec, state: ClusterState, arrives: Callable[[float, KvSlice], None]) -> None:
        """arrives: schedules the arrival of a slice at a time."""
        self._spec, self._state, self._arrives = spec, state, arrives

    def send(self, kv_slice: KvSlice, now: float) -> None:
        """Schedule the arrival of a KV slice; one sent while its span computes arrives after the span's last layer.

        The network cards of an instance's accelerators send together.
        """
        shape, instances = self._spec.shape, self._state.instances
        link = self._spec.links.between(instances[kv_slice.source], instances[kv_slice.target])
        count = (kv_slice.end - kv_slice.start) * shape.kv_bytes_per_token
        # All layers but the last were sent while the span computed.
        if kv_slice.overlapped and self._spec.sends_layers:
            count //= shape.layers
        send_s = kv_slice.backend_state = link.transfer_s(int(count / kv_slice.share / instances[kv_slice.source].tp))
        entry, computed_s = kv_slice.entry, now
        # The last layer (1 / layers of the slice) can be sent only when its span ends.
        if entry is not None and entry.state != "done" and entry.backend_state.due_s < FOREVER:
            computed_s = entry.backend_state.due_s
        self._arrives(max(now + send_s, computed_s + send_s / max(1, shape.layers)), kv_slice)

    def defer(self, kv_slice: KvSlice) -> bool:
        """Return whether a slice must wait for the end of the span that computes it, which was paused meanwhile.

        It is then sent on by `send_deferred`.
        """
        entry = kv_slice.entry
        if entry is None or entry.state == "done" or entry.controlled.ended:
            return False
        entry.backend_state.deferred.append(kv_slice)
        return True

    def send_deferred(self, entry: SpanEntry, now: float) -> None:
        """Schedule the arrival of slices that waited for the end of their span; only the last layer is unsent."""
        run: SimulatedSpan = entry.backend_state
        for kv_slice in run.deferred:
            self._arrives(now + kv_slice.backend_state / self._spec.shape.layers, kv_slice)
        run.deferred = []
