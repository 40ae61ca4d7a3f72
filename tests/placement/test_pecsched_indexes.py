"""PecSched's indexes of replicas: the heap and the node table answer as scans of all replicas do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.policy.placement.pecsched_replicas import HeapArgMin, IndexedNodes
from headway_research.pecsched.literal import ScanArgMin, ScanNodes

STEPS = st.lists(st.tuples(st.integers(0, 11), st.one_of(st.none(), st.integers(0, 6))), max_size=120)


@given(STEPS)
def test_heap_and_scan_give_the_same_minimum(steps: list[tuple[int, int | None]]) -> None:
    heap, scan = HeapArgMin(12), ScanArgMin(12)
    for replica, weight in steps:
        for index in (heap, scan):
            index.discard(replica) if weight is None else index.update(replica, weight)
        assert heap.argmin() == scan.argmin()


def test_stale_heap_entries_are_bounded() -> None:
    heap = HeapArgMin(4)
    for i in range(10_000):
        heap.update(0, i)
        # every update leaves a stale entry: without rebuilding there would be 20,000
        heap.update(1, 10_000 - i)
    assert len(heap._heap) <= heap._limit + 1


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 39), st.integers(0, 9)), max_size=100),
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_node_table_and_scan_select_the_same_replicas(nodes, puts, sizes, rng) -> None:  # type: ignore[no-untyped-def]
    """Nodes of any size, queues that change, groups that are taken and released."""
    table, scan = IndexedNodes(nodes), ScanNodes(nodes)
    available: set[int] = set()
    # drawn without knowledge of the number of replicas
    puts = [(replica % len(nodes), weight) for replica, weight in puts]
    while puts or sizes:
        for replica, weight in puts[:10]:
            available.add(replica)
            table.update(replica, weight)
            scan.update(replica, weight)
        puts = puts[10:]
        size = sizes.pop() if sizes else 1
        taken = table.take(size)
        assert taken == scan.take(size)
        assert (taken is None) == (len(available) < size)
        if taken is None:
            continue
        found = taken.replicas
        assert len(set(found)) == size
        assert available.issuperset(found)
        assert [nodes[i] for i in found] == sorted(nodes[i] for i in found)
        assert taken.nodes == len({nodes[i] for i in found})
        available.difference_update(found)
        if rng.random() < 0.6:
            for replica in found:
                weight = rng.randint(0, 9)
                table.update(replica, weight)
                scan.update(replica, weight)
            available.update(found)


def test_selection_prefers_one_node_and_its_shortest_queues() -> None:
    expected = {
        2: (3, 5),  # 0 + 0 beats 1 + 1
        3: (3, 4, 5),  # 7 beats 11
        4: (1, 3, 4, 5),  # a whole node, then the shortest elsewhere
    }
    for kind in (IndexedNodes, ScanNodes):
        for size, replicas in expected.items():
            nodes = kind([0, 0, 0, 1, 1, 1])
            for replica, weight in enumerate((9, 1, 1, 0, 7, 0)):
                nodes.update(replica, weight)
            assert nodes.take(7) is None
            assert nodes.take(size) == (replicas, 1 + (size > 3))
