"""All instances by number, and messages to several of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from headway.control.kv_reservations import KvLoad, KvReservations
from headway.runtime.cluster.attempt import RequestAttempt
from headway.runtime.cluster.cached_keys import shareable, shares, text_of
from headway.runtime.cluster.cluster_request import ClusterRequest
from headway.runtime.cluster.live_instance import LiveInstance
from headway.runtime.engine.instance_protocol import MeetPeers
from headway.runtime.engine.protocol import AbortRequest


class InstanceRegistry:
    """The instances in the cluster, whatever their state, and the account of their KV (`kv`)."""

    def __init__(self, instances: Iterable[LiveInstance]) -> None:
        self._of = {instance.number: instance for instance in instances}
        self.kv = KvReservations(self._kv_load)

    def __iter__(self) -> Iterator[LiveInstance]:
        return iter(sorted(self._of.values(), key=lambda instance: instance.number))

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, number: int) -> LiveInstance:
        return self._of[number]

    def get(self, number: int) -> LiveInstance | None:
        """None: there is no such instance."""
        return self._of.get(number)

    def add(self, instance: LiveInstance) -> None:
        """Add an instance."""
        self._of[instance.number] = instance

    def remove(self, number: int) -> None:
        """Remove an instance."""
        del self._of[number]

    def tell(self, numbers: Iterable[int], message: msgspec.Struct, *frames: Any) -> None:
        """Send a message to several instances; those that are gone are skipped."""
        for number in numbers:
            instance = self._of.get(number)
            if instance is not None:
                instance.tell(message, *frames)

    def meet(self) -> None:
        """Send the addresses of all reachable instances to each of them."""
        peers = tuple(peer for instance in self if (peer := instance.peer) is not None)
        self.tell([peer.instance for peer in peers], MeetPeers(peers))

    def admit(self, attempt: RequestAttempt, numbers: Iterable[int]) -> None:
        """Send a request's prompt to those of these instances that do not have it."""
        new = [number for number in numbers if number not in attempt.admitted]
        if not new:
            return
        asked = attempt.asked
        shared = {"output": tuple(asked.told), "prefix_cache": shares(asked.submit)}
        admit = msgspec.structs.replace(asked.submit, id=attempt.wire, phase="spans", **shared)
        attempt.admitted.update(new)
        self.tell(new, admit, asked.prompt)

    def forget(self, attempt: RequestAttempt) -> None:
        """Drop a request on all instances that may have anything of it."""
        # `left` too: transfers of instances that were left for now may still be under way there.
        known = attempt.admitted | attempt.whole | attempt.left
        if attempt.at is not None:
            known.add(attempt.at)
        for number in sorted(known):
            instance = self._of.get(number)
            if instance is not None and (instance.moves_kv or (number == attempt.at and not attempt.finished)):
                instance.tell(AbortRequest(attempt.wire))
        attempt.admitted.clear()

    def leave(self, attempt: RequestAttempt, but: Iterable[int]) -> None:
        """Drop a request for now on all instances but some; it may come to the others again."""
        known = (attempt.admitted | attempt.whole) - set(but)
        self.tell(
            [number for number in sorted(known) if (one := self._of.get(number)) is not None and one.moves_kv],
            AbortRequest(attempt.wire, for_good=False),
        )
        attempt.left |= known
        attempt.admitted -= known

    def cached_tokens(self, asked: ClusterRequest) -> tuple[int, ...]:
        """Return how many tokens of a prompt each instance has cached, by number; empty: none has any."""
        keys: dict[int, list[bytes]] = {}
        hits = [0] * (1 + max(self._of, default=-1))
        for number, instance in self._of.items():
            if instance.info is not None and instance.info.prefix_cache:
                size = instance.info.kv_block_tokens
                if size not in keys:
                    text = text_of(asked.submit, asked.prompt, asked.told, size)
                    keys[size] = shareable(text, asked.submit.prompt_tokens + len(asked.told), size)
                hits[number] = size * instance.cached.match(keys[size])
        return tuple(hits) if any(hits) else ()

    def kv_blocks(self, number: int, tokens: int) -> int:
        """Return tokens of KV on an instance rounded up to whole blocks."""
        info = None if number not in self._of else self._of[number].info
        block = 1 if info is None else info.kv_block_tokens
        return -(-tokens // block) * block

    def _kv_load(self, number: int) -> KvLoad | None:
        instance = self._of.get(number)
        if instance is None:
            return None
        return 0 if instance.info is None else instance.info.kv_tokens_total, instance.stats.kv_tokens_used
