"""The connector over peers: every byte to its slot, whoever holds which heads and tokens; nothing after `forget`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.polling import let_arrive
from tests.transfer.kv_ends import LAYERS, SLOTS, End, meet

from headway.core.errors import ConfigError
from headway.runtime.engine.protocol import PeerAddress
from headway.runtime.kv_transfer import slab_memory
from headway.runtime.kv_transfer.connector import SaveKv, make_connector
from headway.runtime.kv_transfer.local import PeerConnector
from headway.runtime.sequence_parallel.layout import HeldShard, moves

Make = Callable[..., list[End]]


class FakeNixl:
    """What is asked of `nixl._api` before there is anything to move."""

    nixl_agent = nixl_agent_config = staticmethod(lambda *_, **__: object())


@pytest.fixture(params=["socket", "peers", "nixl"])
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[End] = []
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="NIXL is not installed (pip install 'headway[nixl]')")

    def make(*heads: range) -> list[End]:
        made.extend(End(number, tmp_path, part, request.param) for number, part in enumerate(heads))
        meet(*made)
        return made

    yield make
    for end in made:
        end.close()


def test_a_slice_arrives_completely_and_is_reported_once(make: Make) -> None:
    sender, receiver = make(range(2), range(2))
    runs = ((50, 30), (10, 10))
    receiver.open("a", 40, runs)
    before = receiver.cache.copy()
    positions = np.arange(40)
    sender.save(SaveKv("a", 7, 1), sender.part(positions, positions + 3))
    receiver.until(lambda: bool(receiver.received))
    (got,) = receiver.received
    assert (got.id, got.piece, got.source) == ("a", 7, 0)
    assert got.began_s <= got.ended_s
    assert np.array_equal(receiver.held(runs, 40, range(2)), sender.cache[:, :, :, 3:43])
    untouched = np.setdiff1d(np.arange(SLOTS), [*range(50, 80), *range(10, 20)])
    assert np.array_equal(receiver.cache[:, :, :, untouched], before[:, :, :, untouched])
    assert receiver.connector.get_num_new_matched_tokens("a") == 40
    assert receiver.connector.get_num_new_matched_tokens("b") is None
    assert receiver.lost == []


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_is_sent_to_any_heads(make: Make, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts as `layout.moves` plans them: re-sharding over heads, heads that several have, tokens in any order."""
    rng = random.Random(seed)
    monkeypatch.setattr(slab_memory, "SLAB_BYTES", rng.choice((64, 704, 1 << 20)))
    senders, receivers = rng.choice(([1, 1], [1, 2], [2, 1], [2, 2], [4, 1], [1, 4], [4, 2], [2, 4], [3, 1]))
    by_heads = rng.random() < 0.5 and senders != 3

    def cut(ranks: int) -> list[range]:
        return [range(i * 4 // ranks, (i + 1) * 4 // ranks) for i in range(ranks)]

    target_heads = cut(receivers)
    source_heads = cut(senders) if by_heads else [range(4)] * senders
    ends = make(*source_heads, *target_heads)
    tokens = rng.randint(1, 40)
    owner = np.array([rng.randrange(senders) for _ in range(tokens)])
    if rng.random() < 0.5:
        owner = np.arange(tokens) % senders
    held = {}
    for rank in range(senders):
        positions = np.arange(tokens) if by_heads else np.flatnonzero(owner == rank)
        if rng.random() < 0.5:
            positions = np.array(rng.sample(positions.tolist(), len(positions)), dtype=np.int64)
        held[rank] = HeldShard(source_heads[rank], positions)
    after = {senders + i: HeldShard(heads, np.arange(tokens)) for i, heads in enumerate(target_heads)}
    runs = ((0, 7), (40, 33), (20, 20)) if rng.random() < 0.7 else ((31, 60),)
    for target in range(senders, senders + receivers):
        ends[target].open("a", tokens, runs)
    slots = {rank: np.array(rng.sample(range(SLOTS), tokens)) for rank in range(senders)}
    plan = moves(held, after)
    expected = 0
    for rank in range(senders):
        for target in after:
            save = SaveKv("a", target, target)
            mine = [move for move in plan if (move.source, move.target) == (rank, target)]
            for layer in range(LAYERS):
                for move in mine:
                    part = ends[rank].part(
                        held[rank].positions[move.from_slots], slots[rank][move.from_slots], move.heads
                    )
                    ends[rank].connector.save_kv_layer(save, layer, part)
            ends[rank].connector.finish_save(save)
            expected += 1
    for target in after:
        receiver = ends[target]
        receiver.until(lambda receiver=receiver: len(receiver.received) == senders)
        assert receiver.connector.get_num_new_matched_tokens("a") == tokens
        got = receiver.held(runs, tokens, receiver.heads)
        for rank, one in held.items():
            shared = range(max(one.heads.start, receiver.heads.start), min(one.heads.stop, receiver.heads.stop))
            for head in shared:
                theirs = ends[rank].cache[:, :, head - one.heads.start, slots[rank][: len(one.positions)]]
                assert np.array_equal(got[:, :, head - receiver.heads.start, one.positions], theirs)
    assert all(end.lost == [] for end in ends)


def test_an_instance_gathers_what_it_holds_itself(make: Make) -> None:
    home, other = make(range(2), range(2))
    runs = ((60, 36),)
    home.open("a", 30, runs)
    for end, positions in ((home, np.arange(0, 30, 2)), (other, np.arange(1, 30, 2))):
        end.save(SaveKv("a", 1, 0), end.part(positions, np.arange(len(positions))))
    home.until(lambda: len(home.received) == 2)
    assert {got.source for got in home.received} == {0, 1}
    got = home.held(runs, 30, range(2))
    assert np.array_equal(got[:, :, :, 0::2], home.cache[:, :, :, :15])
    assert np.array_equal(got[:, :, :, 1::2], other.cache[:, :, :, :15])


def test_an_empty_slice_is_reported_too(make: Make) -> None:
    sender, receiver = make(range(2), range(2))
    receiver.open("a", 40, ((0, 40),))
    sender.connector.finish_save(SaveKv("a", 3, 1))
    receiver.until(lambda: bool(receiver.received))
    assert receiver.received[0].piece == 3
    assert receiver.connector.get_num_new_matched_tokens("a") == 0


def test_slots_may_change_once_saves_were_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slabs so small that nearly nothing has left: the rest is what was there at the time."""
    monkeypatch.setattr(slab_memory, "SLAB_BYTES", 64)
    sender, receiver = make(range(2), range(2))
    receiver.open("a", 90, ((0, 90),))
    positions = np.arange(90)
    before = sender.cache.copy()
    for layer in range(LAYERS):
        sender.connector.save_kv_layer(SaveKv("a", 1, 1), layer, sender.part(positions, positions))
    sender.connector.finish_save(SaveKv("a", 1, 1))
    sender.connector.wait_for_save("a")
    sender.cache[:] = 0
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache[:, :, :, :90], before[:, :, :, :90])


def test_forgotten_kv_is_neither_written_nor_reported(make: Make) -> None:
    sender, receiver = make(range(2), range(2))
    receiver.open("a", 40, ((0, 40),))
    receiver.connector.forget("a")
    receiver.peers.forget("a")
    before = receiver.cache.copy()
    positions = np.arange(40)
    sender.save(SaveKv("a", 1, 1), sender.part(positions, positions))
    receiver.open("b", 40, ((40, 40),))
    sender.save(SaveKv("b", 2, 1), sender.part(positions, positions))
    receiver.until(lambda: bool(receiver.received))
    assert [got.id for got in receiver.received] == ["b"]
    assert np.array_equal(receiver.cache[:, :, :, :40], before[:, :, :, :40])
    assert receiver.connector.get_num_new_matched_tokens("a") is None
    sender.connector.forget("b")
    sender.peers.forget("b")
    assert sender.lost == []


def test_forgotten_requests_leave_room_for_others(make: Make) -> None:
    """More of them than there are slabs, forgotten by one end before they come, or by the other while they leave."""
    sender, receiver = make(range(2), range(2))
    positions = np.arange(40)
    for turn in range(3 * slab_memory.SLABS):
        name, by = f"a{turn}", (sender, receiver)[turn % 2]
        if by is receiver:
            receiver.peers.forget(name)
        sender.save(SaveKv(name, 1, 1), sender.part(positions, positions))
        by.connector.forget(name)
        by.peers.forget(name)
    receiver.open("b", 40, ((40, 40),))
    sender.save(SaveKv("b", 2, 1), sender.part(positions, positions))
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache[:, :, :, 40:80], sender.cache[:, :, :, :40])


def test_a_lost_peer_is_reported_on_both_sides(make: Make) -> None:
    sender, receiver, other = make(range(2), range(2), range(2))
    receiver.open("a", 40, ((0, 40),))
    receiver.open("b", 40, ((40, 40),))
    positions = np.arange(40)
    sender.connector.save_kv_layer(SaveKv("a", 1, 1), 0, sender.part(positions, positions))
    receiver.until(lambda: receiver.connector.get_num_new_matched_tokens("a") == 40 // LAYERS)
    assert receiver.lost == []
    other.save(SaveKv("b", 2, 1), other.part(positions, positions))
    receiver.until(lambda: len(receiver.received) == 1)
    for end in (receiver, other):
        end.peers.meet([PeerAddress(end.number, 0, end.peers.address) for end in (receiver, other)])
    sender.peers.close()
    receiver.until(lambda: bool(receiver.lost))
    assert [lost.id for lost in receiver.lost] == ["a"]
    other.save(SaveKv("c", 3, 0), other.part(positions, positions))
    other.until(lambda: bool(other.lost))
    assert [lost.id for lost in other.lost] == ["c"]
    assert "instance 0" in other.lost[0].why


def test_a_receiver_that_hangs_delays_no_other(make: Make) -> None:
    """More than the sockets hold; whoever computes is not kept waiting, and what it changes then is not sent."""
    sender, receiver, other = make(range(2), range(2), range(2))
    sender.cache = np.random.default_rng(1).integers(0, 255, (LAYERS, 2, 2, SLOTS, 1 << 16), dtype=np.uint8)
    receiver.cache = np.zeros_like(sender.cache)
    receiver.open("a", SLOTS, ((0, SLOTS),))
    other.open("b", 10, ((0, 10),))
    before = sender.cache.copy()
    positions = np.arange(SLOTS)
    with receiver.connector._inbox._gate:
        sender.save(SaveKv("a", 1, 1), sender.part(positions, positions))
        sender.connector.wait_for_save("a")
        sender.cache[:] = 7
        sender.cache = sender.cache[..., :8]
        sender.save(SaveKv("b", 2, 2), sender.part(positions[:10], positions[:10]))
        other.until(lambda: bool(other.received))
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache, before)


def test_a_slice_that_was_not_read_is_lost_to_its_sender(make: Make) -> None:
    """It was in sockets when the other end went: only a piece that was answered is not told."""
    sender, receiver = make(range(2), range(2))
    receiver.open("a", 10, ((0, 10),))
    receiver.open("b", 10, ((10, 10),))
    positions = np.arange(10)
    sender.save(SaveKv("a", 1, 1), sender.part(positions, positions))
    receiver.until(lambda: bool(receiver.received))
    sender.until(lambda: not sender.connector._outlets[1].pending)
    receiver.peers.handle(lambda *_: None)
    sender.save(SaveKv("b", 2, 1), sender.part(positions, positions))
    let_arrive(0.05)
    sender.look()
    assert sender.lost == []
    receiver.peers.close()
    sender.until(lambda: bool(sender.lost))
    assert [lost.id for lost in sender.lost] == ["b"]


@pytest.mark.parametrize("fault", ["heads", "layer", "tokens", "bytes"])
def test_a_body_that_does_not_fit_its_place_is_lost_and_harms_no_other(make: Make, fault: str) -> None:
    sender, receiver = make(range(4), range(2))
    receiver.open("a", 20, ((0, 20),))
    receiver.open("b", 20, ((20, 20),))
    before = receiver.cache.copy()
    positions = np.arange(30 if fault == "tokens" else 10)
    part = sender.part(positions, positions, range(1, 3) if fault == "heads" else range(2))
    if fault == "layer":
        sender.cache = np.concatenate([sender.cache, sender.cache])
        part = sender.part(positions, positions, range(2))
    if fault == "bytes":
        sender.cache = sender.cache[..., :4]
        part = sender.part(positions, positions, range(2))
    sender.connector.save_kv_layer(SaveKv("a", 1, 1), LAYERS + 1 if fault == "layer" else 0, part)
    receiver.until(lambda: bool(receiver.lost))
    assert receiver.lost[0].id == "a"
    assert "instance 0 has sent what cannot be kept" in receiver.lost[0].why
    assert np.array_equal(receiver.cache, before)
    sender.connector.finish_save(SaveKv("b", 2, 1))
    receiver.until(lambda: bool(receiver.received))


def test_auto_is_nixl_where_it_is_installed_and_works(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds(name: str) -> list[str]:
        connector = make_connector(name, end.peers, end.rung.set, 2)
        assert isinstance(connector, PeerConnector)
        return [kind.name for kind in connector._kinds]

    (end,) = make(range(2))
    with monkeypatch.context() as patch:
        patch.setattr("headway.runtime.kv_transfer.connector.find_spec", lambda name: None)
        assert kinds("auto") == ["shared"]
    with monkeypatch.context() as patch:
        patch.setattr("headway.runtime.kv_transfer.connector.find_spec", lambda name: object())
        patch.setattr("headway.runtime.kv_transfer.slab_memory.import_module", lambda name: FakeNixl)
        assert kinds("auto") == kinds("nixl") == ["nixl", "shared"]
        assert kinds("peers") == ["shared"]
        patch.setattr("headway.runtime.kv_transfer.slab_memory.import_module", lambda name: object())
        assert kinds("auto") == ["shared"]
        with pytest.raises(ConfigError, match="kv_connector 'nixl': AttributeError"):
            kinds("nixl")


def test_connectors_are_found_by_name(make: Make) -> None:
    (end,) = make(range(2))
    with pytest.raises(ConfigError, match=r"kv_connector 'mooncake': must be one of auto, nixl, peers"):
        make_connector("mooncake", end.peers, end.rung.set, 2)
