"""Ranks as threads of one process: a double of processes and their connections, for groups of any size."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from headway.runtime.sequence_parallel.attention import MessageStream

WAIT_S = 20.0
T = TypeVar("T")


class Network:
    """One queue for two ranks and a lane. Counts what is sent."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int, MessageStream], queue.Queue[Tensor | None]] = {}
        self._lock = threading.Lock()
        self.sent_bytes = dict.fromkeys(MessageStream, 0)

    def box(self, source: int, target: int, lane: MessageStream) -> queue.Queue[Tensor | None]:
        with self._lock:
            return self._queues.setdefault((source, target, lane), queue.Queue())

    def count(self, lane: MessageStream, size: int) -> None:
        with self._lock:
            self.sent_bytes[lane] += size

    def idle(self) -> bool:
        """Whether everything that was sent has been received."""
        return all(box.empty() for box in self._queues.values())

    def abort(self) -> None:
        with self._lock:
            for box in self._queues.values():
                box.put(None)


class VirtualTransport:
    """`Transport` of one thread. What it sends may be changed at once: copies travel."""

    def __init__(self, rank: int, network: Network) -> None:
        self.rank = rank
        self._network = network

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], lane: MessageStream
    ) -> Callable[[], None]:
        for rank, tensor in sends:
            assert tensor.is_contiguous()
            assert tensor.numel()
            assert rank != self.rank
            self._network.count(lane, tensor.numel() * tensor.element_size())
            self._network.box(self.rank, rank, lane).put(tensor.clone())
        for rank, tensor in receives:
            assert tensor.is_contiguous()
            assert tensor.numel()
            assert rank != self.rank
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))  # what is read too early shows

        def wait() -> None:
            for rank, tensor in receives:
                came = self._network.box(rank, self.rank, lane).get(timeout=WAIT_S)
                if came is None:
                    raise RuntimeError("another rank failed")
                assert came.numel() == tensor.numel(), f"{came.numel()} numbers came for {tensor.numel()}"
                assert came.dtype == tensor.dtype
                tensor.copy_(came.view(tensor.shape))

        return wait


def on_ranks(ranks: Sequence[int], work: Callable[[VirtualTransport], T]) -> list[T]:
    """Run `work` on a thread each and return what they return. Raises what the first of them raised."""
    network = Network()
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = work(VirtualTransport(rank, network))
        except BaseException as error:
            errors.append(error)
            network.abort()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT_S)
        assert not thread.is_alive(), "a rank waits for ever"
    if errors:
        raise errors[0]
    assert network.idle(), "something was sent that nobody received"
    return [results[rank] for rank in ranks]
