"""Staged KV: requests are served whole and in order, blocks are conserved, and no KV has two owners."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.helpers.kv_ops import apply_ops

from headway.core.batch import KvOp
from headway.core.errors import InvariantError, RequestError
from headway.kv.block_allocator import BlockTables
from headway.kv.block_manager import BlockManager
from headway.kv.staged_kv import StagedKv, runs_of

BLOCKS, BLOCK = 20, 4


class CustodyMachine(RuleBasedStateMachine):
    """Asks, grants, releases and adoptions beside a scheduler's own leases; a replica replays the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockManager(BLOCKS * BLOCK, BLOCK)
        self.custody = StagedKv(self.ledger)
        self.replica = BlockTables(BLOCKS)
        self.line: list[tuple[str, int]] = []
        self.kept: dict[str, int] = {}
        self.others: dict[str, int] = {}
        self.named = 0

    def free(self) -> int:
        return BLOCKS - sum(self.kept.values()) - sum(self.others.values())

    @rule(tokens=st.integers(1, 80), runs=st.booleans())
    def ask(self, tokens: int, runs: bool) -> None:
        name = runs_of(f"r{self.named}") if runs else f"r{self.named}"
        self.named += 1
        self.custody.request(name, tokens, float(self.named))
        self.line.append((name, -(-tokens // BLOCK)))

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), tokens=st.integers(1, 80))
    def ask_for_more(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.kept)))
        if name in dict(self.line):
            with pytest.raises(RequestError, match="waits for room already"):
                self.custody.request(name, tokens, 0.0)
            return
        self.custody.request(name, tokens, float(self.named))
        self.line.append((name, -(-tokens // BLOCK)))

    @rule()
    def grant(self) -> None:
        expected = []
        for name, blocks in sorted(self.line, key=lambda item: (item[0] not in self.kept, "/runs" not in item[0])):
            more = max(0, blocks - self.kept.get(name, 0))
            if more > self.free():
                break
            self.kept[name] = self.kept.get(name, 0) + more
            self.line.remove((name, blocks))
            expected.append(name)
        assert self.custody.admit() == expected

    @rule(blocks=st.integers(1, 8))
    def enter(self, blocks: int) -> None:
        """A request of the scheduler's own."""
        name = f"r{self.named}"
        self.named += 1
        if self.ledger.reserve(name, blocks * BLOCK) is not None:
            self.others[name] = blocks

    @precondition(lambda self: self.others)
    @rule(data=st.data(), stays=st.booleans())
    def end(self, data: st.DataObject, stays: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.others)))
        lease = next(lease for lease in self.ledger.leases() if lease.request == name)
        blocks = self.others.pop(name)
        if stays:
            self.custody.store(lease)
            self.kept[name] = blocks
        else:
            self.ledger.free(lease)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.kept)))
        lease = self.custody.claim(name)
        self.line = [ask for ask in self.line if ask[0] != name]
        assert lease.blocks == self.kept[name]
        self.others[name] = self.kept.pop(name)
        with pytest.raises(InvariantError, match="no KV is held"):
            self.custody.claim(name)

    @precondition(lambda self: self.kept or self.line)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({*self.kept, *dict(self.line)})))
        assert self.custody.release(name)
        assert not self.custody.release(name)
        self.kept.pop(name, None)
        self.line = [ask for ask in self.line if ask[0] != name]

    @precondition(lambda self: any(name.endswith("/runs") for name in self.kept))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name in self.kept if name.endswith("/runs"))))
        request = name.removesuffix("/runs")
        blocks = self.kept.pop(name)
        self.line = [ask for ask in self.line if ask[0] != name]
        assert self.custody.to_request(request)
        self.kept.setdefault(request, blocks)
        assert self.custody.to_request(request)

    @precondition(lambda self: any(not name.endswith("/runs") for name in self.kept))
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(name for name in self.kept if not name.endswith("/runs"))))
        runs = runs_of(request)
        if runs in self.kept:
            assert not self.custody.to_span(request)
            return
        assert self.custody.to_span(request)
        assert not self.custody.to_span(request)
        self.line = [ask for ask in self.line if ask[0] != request]
        self.kept[runs] = self.kept.pop(request)

    @rule()
    def carry_out(self) -> None:
        apply_ops(self.replica, self.ledger.drain_ops())
        held = {lease.request: self.ledger.runs(lease) for lease in self.ledger.leases()}
        assert held == {name: self.replica.runs(name) for name in self.replica.owners()}
        self.replica.check()

    @rule()
    def lose(self) -> None:
        if self.named % 5 == 0:
            self.custody.lost()
            self.kept, self.line = {}, []

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.ledger.check()
        assert self.ledger.free_blocks == self.free()
        assert {lease.request: lease.blocks for lease in self.ledger.leases()} == {**self.kept, **self.others}
        assert set(self.custody.names()) == set(self.kept)
        assert self.custody.waiting == tuple(name for name, _ in self.line)


TestCustody = CustodyMachine.TestCase
TestCustody.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True)


def test_pending_requests_are_served_whole_and_in_order() -> None:
    ledger = BlockManager(64, 4)
    custody = StagedKv(ledger)
    other = ledger.reserve("other", 32)
    assert other is not None
    custody.request("large", 48, 0.0)
    custody.request("small", 4, 1.0)
    assert custody.admit() == []
    assert (custody.lease("large"), custody.lease("small"), ledger.free_blocks) == (None, None, 8)
    assert not custody.blocked(1.9, 2.0)
    assert custody.blocked(2.0, 2.0)
    ledger.free(other)
    assert custody.admit() == ["large", "small"]
    assert not custody.blocked(9.0, 2.0)


def test_names_that_hold_kv_are_served_before_new_ones() -> None:
    custody = StagedKv(BlockManager(64, 4))
    custody.request("old", 16, 0.0)
    assert custody.admit() == ["old"]
    custody.request("new", 60, 1.0)
    custody.request("old", 40, 2.0)
    assert custody.admit() == ["old"]
    lease = custody.lease("old")
    assert lease is not None
    assert lease.tokens == 40
    assert custody.waiting == ("new",)


def test_requests_that_never_fit_or_are_computed_here_are_refused() -> None:
    ledger = BlockManager(64, 4)
    custody = StagedKv(ledger)
    with pytest.raises(RequestError, match="65 tokens do not fit the KV cache of 64"):
        custody.request("a", 65, 0.0)
    ledger.reserve("b", 4)
    with pytest.raises(RequestError, match="b waits for room already, or is computed here"):
        custody.request("b", 4, 0.0)


def test_kv_of_spans_becomes_the_requests_without_moving() -> None:
    ledger = BlockManager(64, 4)
    custody = StagedKv(ledger)
    custody.request(runs_of("a"), 10, 0.0)
    custody.admit()
    lease = custody.lease(runs_of("a"))
    assert lease is not None
    runs = ledger.runs(lease)
    assert custody.to_request("a")
    assert custody.lease("a") is lease
    assert ledger.runs(lease) == runs
    assert ledger.drain_ops() == (KvOp("reserve", "a/runs", 3), KvOp("reassign", "a", 0, before="a/runs"))


def test_kv_of_spans_is_freed_if_the_whole_was_received() -> None:
    ledger = BlockManager(64, 4)
    custody = StagedKv(ledger)
    for name in (runs_of("a"), "a"):
        custody.request(name, 10, 0.0)
    custody.admit()
    whole = custody.lease("a")
    assert custody.to_request("a")
    assert custody.lease("a") is whole
    assert list(custody.names()) == ["a"]
    assert not custody.to_request("b")
