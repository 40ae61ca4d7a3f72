"""What ranks say of an earlier room for a request's KV is not taken for a word of a later one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec

from headway.runtime.engine.protocol import KvArrived, ReserveKv, SendKv
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.kv_transfer.connector import SaveKv
from headway.runtime.kv_transfer.multi_rank import MultiRankKvTransfer


def _ranks() -> tuple[MultiRankKvTransfer, list[Any]]:
    told: list[Any] = []
    executor = SimpleNamespace(
        layout=SimpleNamespace(accelerators=2),
        replay=lambda ops: None,
        number=lambda name: 7,
        send_control=told.append,
        on_control=None,
    )
    return MultiRankKvTransfer(cast(MultiProcessExecutor, executor), lambda: ()), told


def test_a_reservation_counts_only_messages_of_its_own_life() -> None:
    ranks, told = _ranks()
    ranks.receive("r", 10, ())
    ranks.forget("r")
    ranks.drop("r", False)
    ranks.receive("r", 20, ())
    first, second = (word.serial for word in told if isinstance(word, ReserveKv))
    for rank in (0, 1):
        ranks._hear(rank, ReserveKv("r", 10, first))
        ranks._hear(rank, KvArrived("r", 1, 5, 0.0, 1.0, True, first))
    assert not ranks.opened()
    assert ranks.awaits("r")
    assert not ranks.finished()
    for rank in (0, 1):
        ranks._hear(rank, ReserveKv("r", 20, second))
        ranks._hear(rank, KvArrived("r", 2, 5, 0.0, 1.0, True, second))
    assert ranks.opened() == ["r"]
    assert not ranks.awaits("r")
    assert [end.piece for end in ranks.finished() if isinstance(end, KvArrived)] == [2]


def test_a_forgotten_reservation_is_not_reported() -> None:
    ranks, told = _ranks()
    ranks.receive("r", 10, ())
    for rank in (0, 1):
        ranks._hear(rank, told[0])
    ranks.forget("r")
    assert not ranks.opened()


def test_ranks_are_told_which_kv_is_there() -> None:
    ranks, told = _ranks()
    ranks.tokens_are_there("r", 40, ())
    assert not told, "nothing is to be sent"
    ranks.send(SaveKv("r", 0, 3), 0, 50)
    ranks.tokens_are_there("r", 40, ())
    ranks.send(SaveKv("r", 1, 3), 0, 50)
    ranks.layers_are_there("r")
    ranks.layers_are_there("r")
    first = SendKv(id="r", piece=0, start=0, end=50, to=3, number=7, there=40)
    assert told == [first, msgspec.structs.replace(first, piece=1, there=0)]
