"""Groups that shrink while they decode: what those that leave hold goes to those that stay; answers are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.checkpoints import make_tiny
from tests.parallel_sequence.sequence_prompts import SHAPE, Model, Part, check_parts
from tests.parallel_sequence.sequence_routes import SMALL_CONFIG, kv_after_moves, marked_slots

from headway.core.errors import ConfigError
from headway.core.request import Strategy
from headway.runtime.sequence_parallel.layout import EMPTY, ChunkSpec, HeldShard, KvLayout, SpGroup, layout_after
from headway.runtime.sequence_parallel.schedule import ChunkPlan


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_tiny("llama", Path(tmp_path_factory.mktemp("model")), **SHAPE))


def one(tokens: int, ranks: int, keepers: int = 0) -> Part:
    return Part(tokens, ranks, order="first", in_place=True, keepers=keepers)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_group_shrinks_and_grows_between_tokens(model: Model, tp: int) -> None:
    parts = [Part(21, 4), one(1, 4), one(1, 4, 2), one(1, 2), one(1, 2), one(1, 4), one(3, 4, 2), one(1, 4)]
    check_parts(model, parts if tp == 1 else [Part(21, 4), one(1, 4, 2), one(1, 2), one(1, 4)], tp)


@st.composite
def shrinks(draw: st.DrawFn) -> tuple[KvLayout, ChunkSpec]:
    """KV anyhow over some of a group's ranks, and a token with which only some of them keep any."""
    ranks = tuple(draw(st.permutations(range(draw(st.integers(1, 5))))))
    tokens = draw(st.integers(1, 40))
    owner = np.array(draw(st.lists(st.sampled_from(ranks), min_size=tokens, max_size=tokens)))
    heads = range(SMALL_CONFIG.kv_heads)
    held = {rank: HeldShard(heads, np.flatnonzero(owner == rank)) for rank in ranks if (owner == rank).any()}
    keepers = {ranks[0], *draw(st.sets(st.sampled_from(ranks)))}
    spec = ChunkSpec(tokens, tokens + 1, SpGroup(ranks), Strategy("ring"), "first", False, True, tuple(sorted(keepers)))
    return held, spec


@settings(max_examples=200)
@given(shrinks())
def test_keepers_hold_their_kv_and_get_an_even_share_of_the_rest(case: tuple[KvLayout, ChunkSpec]) -> None:
    held, spec = case
    chunk = ChunkPlan(spec, held, SMALL_CONFIG)
    assert sorted(np.concatenate([one.positions for one in chunk.after.values()])) == list(range(spec.end))
    sizes, grown = {}, []
    for rank in spec.group.ranks:
        before = held[rank].positions if rank in held else np.empty(0, dtype=np.int64)
        after = chunk.history[rank].positions
        if rank not in spec.keepers:
            assert not len(chunk.after[rank].positions)
            continue
        assert np.array_equal(after[: len(before)], before)
        sizes[rank] = len(after)
        grown += [len(after)] if len(after) > len(before) else []
    if grown:
        assert max(grown) - min(grown) <= 1
        assert max(grown) <= min(sizes.values()) + 1
    marks = kv_after_moves(held, chunk.history)
    assert all(np.array_equal(found, marks[rank]) for rank, found in marked_slots(chunk.history).items())
    after = layout_after([spec], held, SMALL_CONFIG)  # type: ignore[assignment]
    assert {r: h.positions.tolist() for r, h in after.items()} == {  # type: ignore[attr-defined]
        r: h.positions.tolist() for r, h in chunk.after.items()
    }
    smaller = ChunkSpec(spec.end, spec.end + 1, SpGroup(spec.keepers), Strategy("ring"), "first", False, True)
    assert set(ChunkPlan(smaller, chunk.after, SMALL_CONFIG).after) == set(spec.keepers), "who has left is not needed"


@st.composite
def relays(draw: st.DrawFn) -> tuple[KvLayout, ChunkSpec]:
    """KV that some of a group's ranks have by heads, and a token with which all, or some, have it by tokens."""
    group = tuple(draw(st.permutations(range(draw(st.sampled_from([2, 4, 8]))))))
    size = draw(st.sampled_from([size for size in (2, 4, 8) if size <= len(group)]))
    tokens, node = draw(st.integers(1, 40)), draw(st.sampled_from([None, 2]))
    spec = ChunkSpec(0, tokens, SpGroup(group[:size], node=node), Strategy("ulysses"))
    held = layout_after([spec], EMPTY, SMALL_CONFIG)
    keepers = tuple(sorted({group[0], *draw(st.sets(st.sampled_from(group)))})) if draw(st.booleans()) else ()
    return held, ChunkSpec(tokens, tokens + 1, SpGroup(group), Strategy("ring"), "first", False, True, keepers)


@settings(max_examples=100)
@given(relays())
def test_kv_by_heads_is_laid_out_evenly_by_tokens_with_the_first_token_of_a_ring(
    case: tuple[KvLayout, ChunkSpec],
) -> None:
    held, spec = case
    chunk = ChunkPlan(spec, held, SMALL_CONFIG)
    assert sorted(np.concatenate([one.positions for one in chunk.after.values()])) == list(range(spec.end))
    assert all(one.heads == range(SMALL_CONFIG.kv_heads) for one in chunk.after.values())
    sizes = {rank: len(one.positions) for rank, one in chunk.history.items()}
    kept = [sizes.pop(rank) for rank in spec.keepers or spec.group.ranks]
    assert max(kept) - min(kept) <= 1
    assert not any(sizes.values())
    marks = kv_after_moves(held, chunk.history)
    assert all(np.array_equal(found, marks[rank]) for rank, found in marked_slots(chunk.history).items())
    follows = ChunkSpec(
        spec.end, spec.end + 1, SpGroup(spec.keepers or spec.group.ranks), Strategy("ring"), "first", in_place=True
    )
    assert not ChunkPlan(follows, chunk.after, SMALL_CONFIG).moves()


def test_several_single_tokens_are_laid_out_as_one_run() -> None:
    def decoded(start: int, end: int) -> ChunkSpec:
        return ChunkSpec(start, end, SpGroup((2, 0, 1)), Strategy("ring"), "first", False, True)

    begin = layout_after([ChunkSpec(0, 9, SpGroup((0, 1)), Strategy("ring"))], EMPTY, SMALL_CONFIG)
    by_one, at_once = begin, layout_after([decoded(9, 14)], begin, SMALL_CONFIG)
    for at in range(9, 14):
        by_one = layout_after([decoded(at, at + 1)], by_one, SMALL_CONFIG)
    assert {r: h.positions.tolist() for r, h in by_one.items()} == {r: h.positions.tolist() for r, h in at_once.items()}
    assert at_once[2].positions.tolist() == [9, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("keepers", "in_place", "order"),
    [((1,), True, "first"), ((0, 7), True, "first"), ((0,), False, "zigzag")],
)
def test_impossible_keepers_are_refused(keepers: tuple[int, ...], in_place: bool, order: str) -> None:
    with pytest.raises(ConfigError, match="keepers"):
        ChunkSpec(3, 4, SpGroup((0, 1)), Strategy("ring"), order, False, in_place, keepers)
    with pytest.raises(ConfigError, match="order 'first'"):
        ChunkSpec(3, 4, SpGroup((0, 1)), Strategy("ring"), "first")
