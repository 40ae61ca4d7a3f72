from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.policy.placement.pecsched.argmin import HeapArgMin, ScanArgMin
from headway.policy.placement.pecsched.nodes import IndexedNodes, ScanNodes

STEPS = st.lists(st.tuples(st.integers(0, 11), st.one_of(st.none(), st.integers(0, 6))), max_size=120)


@given(STEPS)
def test_the_heap_gives_what_a_scan_gives(steps: list[tuple[int, int | None]]) -> None:
    heap, scan = HeapArgMin(12), ScanArgMin(12)
    for replica, weight in steps:
        for index in (heap, scan):
            index.drop(replica) if weight is None else index.put(replica, weight)
        assert heap.least() == scan.least()


def test_old_entries_do_not_pile_up() -> None:
    heap = HeapArgMin(4)
    for i in range(10_000):
        heap.put(0, i)
        heap.put(1, 10_000 - i)
    assert len(heap._heap) <= heap._limit + 1


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 39), st.integers(0, 9)), max_size=100),
    st.lists(st.integers(1, 12), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_the_table_of_nodes_gives_what_a_scan_gives(nodes, puts, sizes, rng) -> None:  # type: ignore[no-untyped-def]
    """Nodes of any size, queues that change, groups that are taken and given back."""
    table, scan = IndexedNodes(nodes), ScanNodes(nodes)
    able: set[int] = set()
    puts = [(replica % len(nodes), weight) for replica, weight in puts]
    while puts or sizes:
        for replica, weight in puts[:10]:
            able.add(replica)
            table.put(replica, weight)
            scan.put(replica, weight)
        puts = puts[10:]
        size = sizes.pop() if sizes else 1
        taken = table.take(size)
        assert taken == scan.take(size)
        assert (taken is None) == (len(able) < size)
        if taken is None:
            continue
        found = taken.replicas
        assert len(set(found)) == size
        assert able.issuperset(found)
        assert [nodes[i] for i in found] == sorted(nodes[i] for i in found)
        assert taken.nodes == len({nodes[i] for i in found})
        able.difference_update(found)
        if rng.random() < 0.6:
            weights = [rng.randint(0, 9) for _ in found]
            table.give_back(found, weights)
            scan.give_back(found, weights)
            able.update(found)


def test_one_node_where_it_fits_and_the_shortest_queues_there() -> None:
    expected = {
        2: (3, 5),  # 0 + 0 beats 1 + 1
        3: (3, 4, 5),  # 7 beats 11
        4: (1, 3, 4, 5),  # a whole node, then the shortest elsewhere
    }
    for kind in (IndexedNodes, ScanNodes):
        for size, replicas in expected.items():
            nodes = kind([0, 0, 0, 1, 1, 1])
            for replica, weight in enumerate((9, 1, 1, 0, 7, 0)):
                nodes.put(replica, weight)
            assert nodes.take(7) is None
            assert nodes.take(size) == (replicas, 1 + (size > 3))
