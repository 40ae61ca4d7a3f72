"""Instances cut by heads in different ways: what one has is what the other gets, head by head, and is told of once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.polling import let_arrive, until
from tests.transfer.kv_ends import LAYERS, SLOTS, VECTOR, End

from headway.runtime.engine.protocol import PeerAddress, end_of, heads_of
from headway.runtime.kv_transfer.connector import Bytes, SaveKv

KV = 4


class CutInstance:
    """The ends of an instance's ranks; the bytes of each are the whole model's at its heads."""

    def __init__(self, number: int, ranks: int, folder: Path) -> None:
        rng = np.random.default_rng(number)
        self.number = number
        self.whole: Bytes = rng.integers(0, 255, (LAYERS, 2, KV, SLOTS, VECTOR), dtype=np.uint8)
        self.ranks: list[End] = []
        for rank in range(ranks):
            end = End(end_of(number, rank), folder, heads_of(KV, ranks, rank), kv_heads=KV, ranks=ranks)
            end.cache = np.ascontiguousarray(self.whole[:, :, end.heads.start : end.heads.stop])
            self.ranks.append(end)

    @property
    def peer(self) -> PeerAddress:
        first, *others = (rank.peers.address for rank in self.ranks)
        return PeerAddress(self.number, 0, first, tuple(others))

    def open(self, request: str, tokens: int, runs: tuple[tuple[int, int], ...]) -> None:
        for rank in self.ranks:
            rank.open(request, tokens, runs)

    def save(self, save: SaveKv, positions: np.ndarray, slots: np.ndarray, but: int = -1) -> None:
        for index, rank in enumerate(self.ranks):
            if index != but:
                rank.save(save, rank.part(positions, slots))

    def until(self, true: Callable[[End], bool]) -> None:
        for rank in self.ranks:
            rank.until(lambda rank=rank: true(rank))


Make = Callable[[int, int], tuple[CutInstance, CutInstance]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[CutInstance] = []

    def make(sources: int, targets: int) -> tuple[CutInstance, CutInstance]:
        made.extend((CutInstance(0, sources, tmp_path), CutInstance(1, targets, tmp_path)))
        for instance in made:
            for rank in instance.ranks:
                rank.peers.meet([each.peer for each in made])
        return made[0], made[1]

    yield make
    for instance in made:
        for rank in instance.ranks:
            rank.close()


@pytest.mark.parametrize(
    ("sources", "targets"), [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2), (4, 4), (8, 1), (1, 8), (8, 2), (2, 8), (8, 8)]
)
def test_each_rank_gets_its_heads_and_a_slice_is_reported_once(make: Make, sources: int, targets: int) -> None:
    source, target = make(sources, targets)
    runs = ((50, 20), (7, 13))
    target.open("r", 33, runs)
    for piece, (start, end) in enumerate(((0, 12), (12, 33))):
        positions = np.arange(start, end)
        source.save(SaveKv("r", piece, 1), positions, positions + 40)
    target.until(lambda rank: len(rank.received) == 2)
    for rank in target.ranks:
        assert [(got.id, got.piece, got.source) for got in rank.received] == [("r", 0, 0), ("r", 1, 0)]
        assert all(got.began_s <= got.ended_s for got in rank.received)
        assert rank.connector.get_num_new_matched_tokens("r") == 33
        held = rank.held(runs, 33, rank.heads)
        assert np.array_equal(held, source.whole[:, :, rank.heads.start : rank.heads.stop, 40:73])
        assert rank.lost == []


def test_a_piece_is_not_there_before_the_last_rank_has_sent(make: Make) -> None:
    source, target = make(2, 1)
    target.open("r", 10, ((0, 10),))
    source.save(SaveKv("r", 1, 1), np.arange(10), np.arange(10), but=1)
    (rank,) = target.ranks
    let_arrive()
    rank.look()
    assert rank.received == []
    source.save(SaveKv("r", 1, 1), np.arange(10), np.arange(10), but=0)
    target.until(lambda rank: bool(rank.received))
    assert rank.connector.get_num_new_matched_tokens("r") == 10


@pytest.mark.parametrize("first", ["looked", "forgotten"])
def test_no_part_of_a_forgotten_request_is_kept(make: Make, first: str) -> None:
    """Whether its first part was taken before or not."""
    source, target = make(2, 1)
    target.open("r", 10, ((0, 10),))
    source.save(SaveKv("r", 1, 1), np.arange(10), np.arange(10), but=1)
    (rank,) = target.ranks

    def has_come() -> bool:
        if first == "looked":
            rank.look()
        return rank.connector.get_num_new_matched_tokens("r") == 5 and (first != "looked" or bool(rank.connector._come))

    until(has_come)
    let_arrive()
    rank.connector.forget("r")
    rank.look()
    assert rank.received == []
    assert not rank.connector._come


def test_a_lost_rank_is_reported_by_the_waiting_rank(make: Make) -> None:
    """What the others have sent is not taken for the whole; once forgotten, the same name may come again."""
    source, target = make(2, 2)
    target.open("r", 10, ((0, 10),))
    source.save(SaveKv("r", 1, 1), np.arange(10), np.arange(10), but=1)
    target.ranks[0].look()
    late = source.ranks[1]
    late.connector.save_kv_layer(SaveKv("r", 1, 1), 0, late.part(np.arange(10), np.arange(10)))
    let_arrive()
    late.peers.close()

    def has_lost() -> bool:
        target.ranks[1].look()
        return bool(target.ranks[1].lost)

    until(has_lost)
    assert [lost.id for lost in target.ranks[1].lost] == ["r"]
    assert target.ranks[1].received == []
