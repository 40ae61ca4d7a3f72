"""The block allocator and the tables that replay on it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import InvariantError
from headway.kv.allocator import BlockAllocator, BlockTables

Op = tuple[str, int, int]
OPS = st.lists(st.tuples(st.sampled_from(["add", "add", "free"]), st.integers(0, 5), st.integers(1, 9)), max_size=60)


def blocks_of(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [block for first, count in runs for block in range(first, first + count)]


def play(tables: BlockTables, ops: list[Op]) -> dict[str, int]:
    """Carry out those operations that are possible; returns how many blocks each owner has been given."""
    held: dict[str, int] = {}
    for verb, owner, blocks in ops:
        name = f"r{owner}"
        if verb == "add" and blocks <= tables.allocator.free_blocks:
            tables.add(name, blocks)
            held[name] = held.get(name, 0) + blocks
        elif verb == "free" and name in held:
            tables.free(name)
            del held[name]
        tables.check()
    return held


@given(OPS)
def test_every_block_is_free_or_owned_once_and_the_same_operations_give_the_same_blocks(ops: list[Op]) -> None:
    tables, other = BlockTables(24), BlockTables(24)
    held = play(tables, ops)
    assert play(other, ops) == held
    assert {name: tables.runs(name) for name in held} == {name: other.runs(name) for name in held}
    owned = [block for name in held for block in blocks_of(tables.runs(name))]
    free = blocks_of(tables.allocator.free_runs())
    assert sorted(owned + free) == list(range(24))
    assert {name: len(blocks_of(tables.runs(name))) for name in held} == held
    assert tables.allocator.free_blocks == len(free)
    for name in held:
        tables.free(name)
    assert tables.allocator.free_runs() == ((0, 24),)


@given(OPS, st.integers(1, 9))
def test_smallest_free_run_that_holds_all_blocks_is_taken(ops: list[Op], blocks: int) -> None:
    tables = BlockTables(24)
    play(tables, ops)
    fitting = [run for run in tables.allocator.free_runs() if run[1] >= blocks]
    if not fitting:
        return
    tables.add("new", blocks)
    assert tables.runs("new") == ((min(fitting, key=lambda run: (run[1], run[0]))[0], blocks),)


@given(OPS, st.integers(1, 9))
def test_growth_extends_in_place_if_the_next_block_is_free(ops: list[Op], blocks: int) -> None:
    tables = BlockTables(24)
    for name in play(tables, ops):
        runs = tables.runs(name)
        end = runs[-1][0] + runs[-1][1]
        behind = next((count for first, count in tables.allocator.free_runs() if first == end), 0)
        if not behind or blocks > tables.allocator.free_blocks:
            continue
        tables.add(name, blocks)
        grown = tables.runs(name)
        assert grown[: len(runs) - 1] == runs[:-1]
        assert grown[len(runs) - 1] == (runs[-1][0], runs[-1][1] + min(blocks, behind))
        return


def test_a_request_larger_than_any_run_takes_the_largest_first() -> None:
    tables = BlockTables(10)
    for name, blocks in (("a", 2), ("b", 1), ("c", 4), ("d", 3)):
        tables.add(name, blocks)
    tables.free("a")
    tables.free("c")
    tables.add("e", 5)
    assert tables.runs("e") == ((3, 4), (0, 1))


def test_allocating_more_than_is_free_raises_with_the_free_count() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    with pytest.raises(InvariantError, match="2 blocks asked of an allocator with 1 free"):
        allocator.allocate(2)
    assert allocator.free_runs() == ((3, 1),)


@pytest.mark.parametrize("run", [(0, 1), (3, 1), (2, 3), (5, 1)])
def test_a_block_that_is_free_cannot_be_released(run: tuple[int, int]) -> None:
    allocator = BlockAllocator(8)
    allocator.allocate(8)
    allocator.release([(0, 4), (5, 1)])
    with pytest.raises(InvariantError, match="released twice"):
        allocator.release([run])


def test_freeing_an_unknown_request_is_an_error() -> None:
    with pytest.raises(InvariantError, match="request x owns no blocks"):
        BlockTables(4).free("x")


CORRUPTIONS = {
    "two owners": {"a": [(0, 3)], "b": [(2, 2)]},
    "owned and free, another lost": {"a": [(0, 2)], "b": [(3, 2)]},
    "lost": {"a": [(0, 1)], "b": [(2, 2)]},
    "beyond the pool": {"a": [(0, 2)], "b": [(2, 2), (8, 1)]},
    "before the pool": {"a": [(-1, 3)], "b": [(2, 2)]},
}


@pytest.mark.parametrize("runs", CORRUPTIONS.values(), ids=CORRUPTIONS.keys())
def test_check_notices_corrupted_tables(runs: dict[str, list[tuple[int, int]]]) -> None:
    tables = BlockTables(8)
    tables.add("a", 2)
    tables.add("b", 2)
    tables.check()
    tables._runs = runs
    with pytest.raises(InvariantError):
        tables.check()


@pytest.mark.parametrize("free", [[(4, 3)], [(4, 5)], [(4, 2), (6, 2)], [(6, 2), (4, 2)], [(4, 0), (5, 3)], []])
def test_check_notices_a_corrupted_free_list(free: list[tuple[int, int]]) -> None:
    tables = BlockTables(8)
    tables.add("a", 4)
    tables.allocator._free = free
    with pytest.raises(InvariantError):
        tables.check()
