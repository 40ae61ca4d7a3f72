"""Any connector, between instances that are cut by heads, each in its own number of ranks (`rank_routes`).

What is saved to an instance goes to those of its ranks that have heads of it; a piece has come from an instance when it
has come from all of its ranks that send here. So its user knows instances only, and the connector inside ends only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from headway.runtime.kv_transfer.connector import FinishedTransfers, KvConnector, KvPart, KvPlace, KvReceived, SaveKv
from headway.runtime.kv_transfer.rank_routes import end_of, instance_of, rank_of, routes


class ReshardingConnector(KvConnector):
    """The end of rank `rank` of `ranks`. ranks_of: how many another instance has. `get_finished` may be called from
    another thread than the rest."""

    def __init__(
        self, inner: KvConnector, kv_heads: int, ranks_of: Callable[[int], int], rank: int = 0, ranks: int = 1
    ) -> None:
        self._inner, self._kv_heads, self._ranks_of = inner, kv_heads, ranks_of
        self._rank, self._ranks = rank, ranks
        self._gate = threading.Lock()
        self._come: dict[tuple[str, int, int], dict[int, KvReceived]] = {}

    def update_state_after_alloc(self, request: str, place: KvPlace) -> None:
        self._inner.update_state_after_alloc(request, place)

    def get_num_new_matched_tokens(self, request: str) -> int | None:
        return self._inner.get_num_new_matched_tokens(request)

    def forget(self, request: str) -> None:
        self._inner.forget(request)
        with self._gate:
            for key in [key for key in self._come if key[0] == request]:
                del self._come[key]

    def save_kv_layer(self, save: SaveKv, layer: int, part: KvPart) -> None:
        for end, heads in self._to(save.to):
            start, stop = max(heads.start, part.heads.start), min(heads.stop, part.heads.stop)
            if start < stop:
                some = replace(part, heads=range(start, stop), row=part.row + start - part.heads.start)
                self._inner.save_kv_layer(save._replace(to=end), layer, some)

    def finish_save(self, save: SaveKv) -> None:
        for end, _ in self._to(save.to):
            self._inner.finish_save(save._replace(to=end))

    def wait_for_save(self, request: str) -> None:
        self._inner.wait_for_save(request)

    def get_finished(self) -> FinishedTransfers:
        received, lost = self._inner.get_finished()
        whole = []
        for one in received:
            instance = instance_of(one.source)
            key = (one.request, one.piece, instance)
            with self._gate:
                if self._inner.get_num_new_matched_tokens(one.request) is None:  # forgotten since it came
                    continue
                # By rank: a slice is complete once every source rank that sends here has reported its part.
                come = self._come.setdefault(key, {})
                come[rank_of(one.source)] = one
                if come.keys() < self._from(instance):
                    continue
                del self._come[key]
            began_s = min(each.began_s for each in come.values())
            whole.append(one._replace(source=instance, began_s=began_s))
        return FinishedTransfers(whole, lost)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _to(self, instance: int) -> list[tuple[int, range]]:
        """The ends of an instance to which something goes from here, with its heads."""
        found = routes(self._kv_heads, self._ranks, self._ranks_of(instance))
        return [(end_of(instance, target), heads) for (rank, target), heads in found.items() if rank == self._rank]

    def _from(self, instance: int) -> set[int]:
        """The ranks of an instance that send something here."""
        found = routes(self._kv_heads, self._ranks_of(instance), self._ranks)
        return {rank for rank, target in found if target == self._rank}
