"""Placements, masks, rings, layouts and moves as data: what must be true of them for every size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.parallel_sequence.sequence_routes import SMALL_CONFIG, gathered, kv_after_moves, marked_slots, routes

from headway.core.errors import ConfigError
from headway.core.request import Strategy
from headway.runtime.sequence_parallel.layout import (
    EMPTY,
    ORDERS,
    ChunkSpec,
    KvLayout,
    SpGroup,
    moves,
    spread,
)
from headway.runtime.sequence_parallel.schedule import ChunkPlan, ExchangeRows, MaskBlock, mask_blocks, ring


def seen(blocks: tuple[MaskBlock, ...], rows: int, keys: int) -> np.ndarray:
    """How often each pair is attended."""
    counts = np.zeros((rows, keys), dtype=int)
    for block in blocks:
        height, width = block.row_end - block.row, block.key_end - block.key
        assert height > 0
        assert width > 0
        part = np.ones((height, width), dtype=int)
        if block.causal:
            assert height == width
            part = np.tril(part)
        counts[block.row : block.row_end, block.key : block.key_end] += part
    return counts


positions = st.sets(st.integers(0, 60), max_size=24).map(lambda found: np.array(sorted(found), dtype=np.int64))


@given(positions, positions, st.integers(0, 5))
def test_a_cover_of_blocks_equals_the_causal_mask(queries: np.ndarray, keys: np.ndarray, past: int) -> None:
    mask = np.concatenate([np.ones((len(queries), past), dtype=int), keys[None] <= queries[:, None]], axis=1)
    assert np.array_equal(seen(mask_blocks(queries, keys, past), *mask.shape), mask)


@given(st.integers(0, 40), st.integers(1, 60), st.integers(1, 9), st.sampled_from(ORDERS))
def test_every_token_has_one_place(start: int, tokens: int, members: int, order: str) -> None:
    parts = spread(start, tokens, members, order)
    assert sorted(np.concatenate(parts)) == list(range(start, start + tokens))
    assert all(np.all(np.diff(part) > 0) for part in parts)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= (2 if order == "zigzag" else 1)


@given(
    st.integers(1, 50), st.integers(1, 8), st.sampled_from(ORDERS), st.lists(st.integers(0, 5), min_size=8, max_size=8)
)
def test_a_ring_attends_to_every_pair_once(tokens: int, members: int, order: str, past: list[int]) -> None:
    fresh, past = spread(100, tokens, members, order), past[:members]
    for member in range(members):
        steps = ring(member, fresh, past)
        assert sorted(step.source for step in steps) == list(range(members))
        assert steps[0].source == member
        for step, behind in pairwise(steps):
            assert (step.arriving, step.arriving_keys) == (behind.source, behind.keys)
            given_away = ring((member - 1) % members, fresh, past)[steps.index(step)]
            assert (step.arriving, step.arriving_keys) == (given_away.source, given_away.keys)
        assert steps[-1].arriving == -1
        for step in steps:
            mask = fresh[step.source][None] <= fresh[member][:, None]
            history = np.ones((len(fresh[member]), past[step.source]), dtype=int)
            wanted = np.concatenate([history, mask], axis=1)
            assert step.keys == wanted.shape[1]
            assert np.array_equal(seen(step.blocks, *wanted.shape), wanted)


@pytest.mark.parametrize("order", ["zigzag", "striped"])
def test_placements_balance_the_work_and_the_calls(order: str) -> None:
    """Contiguous shares leave the last of 8 members 15 times the first one's work."""
    fresh = spread(0, 4096, 8, order)
    work = [sum(int(seen(s.blocks, len(fresh[m]), s.keys).sum()) for s in ring(m, fresh, [0] * 8)) for m in range(8)]
    assert max(work) / min(work) < 1.01
    assert all(len(s.blocks) <= 2 for m in range(8) for s in ring(m, fresh, [512] * 8))


@settings(max_examples=150)
@given(routes())
def test_moves_produce_every_layout_and_sends_match_receives(route: list[ChunkSpec]) -> None:
    """What one rank sends is what another expects, and each target is filled: once, or by every sender for a sum."""
    held: KvLayout = EMPTY
    for spec in route:
        chunk = ChunkPlan(spec, held, SMALL_CONFIG)
        for rank, marks in kv_after_moves(held, chunk.history).items():
            assert np.array_equal(marks, marked_slots(chunk.history)[rank])
        sizes = {len(one.positions) for one in chunk.history.values()}
        assert max(sizes) - min(sizes) <= 1
        kept = {head for one in chunk.after.values() for head in one.heads}
        assert kept == set(range(SMALL_CONFIG.kv_heads))
        check_exchanges(chunk)
        held = chunk.after
    for tp in (1, 2, 4):
        final = gathered(range(50, 50 + tp), route[-1].end, SMALL_CONFIG)
        for rank, marks in kv_after_moves(held, final).items():
            assert np.array_equal(marks, marked_slots(final)[rank])


def test_growing_a_ring_moves_as_little_as_can_be() -> None:
    """Twice the ranks: each of the old ones gives the second half of what it holds, and nothing else moves (Fig. 5)."""
    one = ChunkPlan(ChunkSpec(0, 64, SpGroup((0, 1, 2, 3))), EMPTY, SMALL_CONFIG)
    two = ChunkPlan(ChunkSpec(64, 96, SpGroup(tuple(range(8)))), one.after, SMALL_CONFIG)
    real = [move for move in moves(one.after, two.history) if move.source != move.target]
    assert [(move.source, move.target, len(move.to_slots)) for move in real] == [(i, 4 + i, 8) for i in range(4)]
    assert all(list(move.from_slots) == list(range(8, 16)) for move in real)


def check_exchanges(chunk: ChunkPlan) -> None:
    lists = {}
    for rank in chunk.spec.group.ranks:
        plan, found = chunk.rank(rank), list[ExchangeRows]()
        for step in (*plan.enter, *plan.fetch, *plan.layer, *plan.leave):
            found += [step] if isinstance(step, ExchangeRows) else list(getattr(step, "parts", ()))
        lists[rank] = found
    check_messages(lists)
    for found in lists.values():
        for step in found:
            check_target(step)


def check_messages(lists: dict[int, list[ExchangeRows]]) -> None:
    """Between two ranks, sizes in the order sent are sizes in the order expected, register by register."""
    sent: dict[tuple[int, int], list[tuple[str, list[int]]]] = {}
    expected: dict[tuple[int, int], list[tuple[str, list[int]]]] = {}
    for rank, found in lists.items():
        for step in found:
            for piece in step.sends:
                sent.setdefault((rank, piece.peer), []).append((step.target, [cut.size for cut in piece.cuts]))
            for piece in step.receives:
                expected.setdefault((piece.peer, rank), []).append((step.target, [cut.size for cut in piece.cuts]))
    assert sent == expected


def check_target(step: ExchangeRows) -> None:
    filled = np.zeros((step.rows, step.columns), dtype=int)
    for piece in step.receives:
        for cut in piece.cuts:
            filled[cut.row : cut.row_end, cut.column : cut.column_end] += 1
    if step.add:
        assert len(np.unique(filled)) <= 1
        assert all(len(piece.cuts) == 1 for piece in step.receives)
    elif not step.target.endswith("bias"):
        assert np.all(filled == (1 if step.receives else 0))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SpGroup(()), "group.ranks"),
        (lambda: SpGroup((0, 1, 1)), "group.ranks"),
        (lambda: SpGroup((0, 1, 2), tp=2), "group.tp 2"),
        (lambda: SpGroup((0, 1, 2, 3), tp=2, node=1), "group.node 1"),
        (lambda: ChunkSpec(4, 4, SpGroup((0,))), r"chunk \[4, 4\)"),
        (lambda: ChunkSpec(0, 4, SpGroup((0,)), order="spiral"), "order 'spiral'"),
        (
            lambda: ChunkPlan(ChunkSpec(0, 4, SpGroup((0, 1, 2)), Strategy(attn="ulysses")), EMPTY, SMALL_CONFIG),
            "ulysses over 3",
        ),
        (
            lambda: ChunkPlan(ChunkSpec(0, 4, SpGroup((0, 1), 2), Strategy(attn="ulysses")), EMPTY, SMALL_CONFIG),
            "ulysses is for instances of one process",
        ),
        (lambda: ChunkPlan(ChunkSpec(4, 8, SpGroup((0,))), EMPTY, SMALL_CONFIG), "chunk start 4"),
        (lambda: ChunkPlan(ChunkSpec(0, 4, SpGroup((0,))), EMPTY, SMALL_CONFIG, wanted=[4]), "wanted"),
        (
            lambda: ChunkPlan(
                ChunkSpec(8, 9, SpGroup((0, 2))),
                ChunkPlan(ChunkSpec(0, 8, SpGroup((0, 1))), EMPTY, SMALL_CONFIG).after,
                SMALL_CONFIG,
            ),
            r"must include ranks \[1\]",
        ),
    ],
)
def test_impossible_layouts_are_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
