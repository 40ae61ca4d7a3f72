"""KV transfers: limits are kept, requests are served by first handshake, lost slices block no other request."""

from __future__ import annotations

import heapq
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.entries import KvSlice, TransferQueue


def slice_of(request: str, source: int, target: int, seconds: float) -> KvSlice:
    kv_slice = KvSlice(request, source, target)
    kv_slice.backend_state = seconds
    return kv_slice


def run(
    transfers: TransferQueue, adds: list[tuple[float, list[KvSlice]]], backends: int
) -> list[tuple[float, KvSlice]]:
    """Announce slices at their times and let each take its seconds; return (end, slice) in order of the ends. Limits of
    senders and receivers are checked at every step."""
    # negative serial numbers: at equal times announcements come before ends
    heap: list[tuple[float, int, KvSlice | None]] = [(at, -len(adds) + i, None) for i, (at, _) in enumerate(adds)]
    heapq.heapify(heap)
    queue, active, ended, serial = sorted(adds, key=lambda a: a[0]), [], [], 0
    while heap:
        now, _, kv_slice = heapq.heappop(heap)
        if kv_slice is None:
            transfers.add(queue.pop(0)[1], now)
        else:
            active.remove(kv_slice)
            transfers.finish(kv_slice)
            ended.append((now, kv_slice))
        for begun in transfers.start(now):
            serial += 1
            active.append(begun)
            heapq.heappush(heap, (now + begun.backend_state, serial, begun))
        for target in {p.target for p in active}:
            assert sum(p.target == target for p in active) <= backends
        assert len({p.source for p in active}) == len(active), "a sender sends one kv_slice at a time"
    return ended


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.integers(0, 1 << 30))
def test_all_slices_arrive_within_sender_and_receiver_limits(seed: int) -> None:
    rng = random.Random(seed)
    backends, adds, count = rng.choice((1, 2, 5)), [], 0
    for request in range(rng.randint(1, 8)):
        target = 100 + rng.randint(0, 1)
        for _ in range(rng.randint(1, 3)):
            kv_slices = [
                slice_of(f"r{request}", s, target, rng.uniform(0.1, 1.0))
                for s in rng.sample(range(8), rng.choice((1, 2, 4)))
            ]
            adds.append((rng.uniform(0, 3), kv_slices))
            count += len(kv_slices)
    transfers = TransferQueue(backends)
    ended = run(transfers, adds, backends)
    assert len(ended) == count
    assert all(transfers.left(f"r{i}", t) == 0 for i in range(8) for t in (100, 101))


def test_later_chunks_of_an_earlier_request_go_before_first_chunks_of_others() -> None:
    def kv_slices(request: str, sources: range) -> list[KvSlice]:
        return [slice_of(request, s, 9, 1.0) for s in sources]

    def adds() -> list[tuple[float, list[KvSlice]]]:
        return [(0.0, kv_slices("a", range(2))), (0.1, kv_slices("b", range(2, 6))), (0.2, kv_slices("a", range(6, 8)))]

    # a's second announcement is the latest, and ranks by its first handshake
    order = [kv_slice.request for _, kv_slice in run(TransferQueue(2), adds(), 2)]
    assert order == ["a"] * 4 + ["b"] * 4
    naive = [kv_slice.request for _, kv_slice in run(TransferQueue(2, "first-come"), adds(), 2)]
    assert naive == ["a"] * 2 + ["b"] * 4 + ["a"] * 2


def test_a_rank_outlives_a_gap_between_chunks_and_ends_with_its_request() -> None:
    transfers = TransferQueue(1)
    (first,) = _announced(transfers, "a", 0, 0.0)
    assert transfers.finish(first, more=True), "no slice of it is left"
    transfers.add([KvSlice("b", 1, 9), KvSlice("b", 2, 9)], 1.0)
    (slow,) = transfers.start(1.0)
    transfers.add([KvSlice("a", 3, 9)], 2.0)
    transfers.finish(slow)
    assert [kv_slice.request for kv_slice in transfers.start(3.0)] == ["a"], "b has announced its slices earlier"
    # the id is used again: the new request's place is that of its own handshake
    transfers.cancel("a")
    (again,) = transfers.start(4.0)
    transfers.add([KvSlice("a", 3, 9)], 5.0)
    transfers.add([KvSlice("c", 4, 9)], 4.5)
    assert transfers.finish(again)
    assert [kv_slice.request for kv_slice in transfers.start(6.0)] == ["c"]


def _announced(transfers: TransferQueue, request: str, source: int, now: float) -> list[KvSlice]:
    transfers.add([KvSlice(request, source, 9)], now)
    return transfers.start(now)


def test_drop_withdraws_waiting_slices_and_lets_granted_ones_finish() -> None:
    transfers = TransferQueue(1)
    transfers.add([KvSlice("b", 0, 9), KvSlice("b", 1, 9)], 0.0)
    (slow,) = transfers.start(0.0)
    transfers.drop("b")
    assert transfers.finish(slow)
    assert not transfers.start(9.0)


def test_cancel_and_loss_free_both_ends_once() -> None:
    transfers = TransferQueue(1)
    transfers.add([KvSlice("a", 0, 9), KvSlice("a", 1, 9)], 0.0)
    transfers.add([KvSlice("b", 0, 8)], 0.0)
    transfers.add([KvSlice("c", 2, 9)], 0.0)
    (first,) = transfers.start(0.0)
    assert {i for name, i in transfers.all_ends() if name == "a"} == {0, 1, 9}
    transfers.cancel("a")
    assert first.ended
    assert not transfers.finish(first), "told twice"
    assert not {i for name, i in transfers.all_ends() if name == "a"}
    assert [p.request for p in transfers.start(1.0)] == ["c", "b"], "its sender and its backend are free"
    transfers.lose(8)
    (left,) = transfers.under_way()
    assert left.request == "c"
    assert transfers.finish(left)
    assert transfers.left("b", 8) == transfers.left("c", 9) == 0


def test_of_slices_that_wait_for_blocks_one_is_asked_about_until_blocks_are_granted() -> None:
    queue, asked, granted = TransferQueue(4), [], set[str]()
    queue.parks = True

    def ready(kv_slice: KvSlice) -> bool:
        asked.append(kv_slice.request)
        return kv_slice.request in granted

    for source, name in enumerate("abc"):
        queue.add([KvSlice(name, source, 9, 0, 10, 1, None)], float(source))
    assert queue.start(3.0, ready) == []
    assert queue.start(4.0, ready) == []
    assert asked == ["a", "b", "c", "a"]
    granted.update("bc")
    queue.unpark("b", 9)
    assert [each.request for each in queue.start(5.0, ready)] == ["b"]
    assert {i for name, i in queue.all_ends() if name == "a"} == {0, 9}
    queue.drop("a")
    assert (queue.left("a", 9), queue.left("c", 9)) == (0, 1)
    queue.unpark("c", 9)
    assert [each.request for each in queue.start(6.0, ready)] == ["c"]
