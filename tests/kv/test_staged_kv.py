"""Staged KV: requests are served whole and in order, blocks are conserved, and no KV has two owners."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.helpers.present import present

from headway.core.batch import KvOp
from headway.core.errors import InvariantError, RequestError
from headway.kv.allocator import BlockTables
from headway.kv.block_manager import BlockManager
from headway.kv.staged_kv import StagedKv, is_span_kv, span_kv_name

BLOCKS, BLOCK = 20, 4


class StagedKvMachine(RuleBasedStateMachine):
    """Asks, grants, releases and adoptions beside a scheduler's own leases; a replica replays the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.block_manager = BlockManager(BLOCKS * BLOCK, BLOCK)
        self.staged_kv = StagedKv(self.block_manager)
        self.replica = BlockTables(BLOCKS)
        self.line: list[tuple[str, int]] = []
        self.kept: dict[str, int] = {}
        self.others: dict[str, int] = {}
        self.named = 0

    def free(self) -> int:
        return BLOCKS - sum(self.kept.values()) - sum(self.others.values())

    @rule(tokens=st.integers(1, 80), runs=st.booleans())
    def ask(self, tokens: int, runs: bool) -> None:
        name = span_kv_name(f"r{self.named}") if runs else f"r{self.named}"
        self.named += 1
        self.staged_kv.request(name, tokens, float(self.named))
        self.line.append((name, -(-tokens // BLOCK)))

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), tokens=st.integers(1, 80))
    def ask_for_more(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.kept)))
        if name in dict(self.line):
            with pytest.raises(RequestError, match="waits for room already"):
                self.staged_kv.request(name, tokens, 0.0)
            return
        self.staged_kv.request(name, tokens, float(self.named))
        self.line.append((name, -(-tokens // BLOCK)))

    @rule()
    def grant(self) -> None:
        expected = []
        for name, blocks in sorted(self.line, key=lambda item: (item[0] not in self.kept, not is_span_kv(item[0]))):
            more = max(0, blocks - self.kept.get(name, 0))
            if more > self.free():
                break
            self.kept[name] = self.kept.get(name, 0) + more
            self.line.remove((name, blocks))
            expected.append(name)
        assert self.staged_kv.admit() == expected

    @rule(blocks=st.integers(1, 8))
    def enter(self, blocks: int) -> None:
        """A request of the scheduler's own."""
        name = f"r{self.named}"
        self.named += 1
        if self.block_manager.reserve(name, blocks * BLOCK) is not None:
            self.others[name] = blocks

    @precondition(lambda self: self.others)
    @rule(data=st.data(), stays=st.booleans())
    def end(self, data: st.DataObject, stays: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.others)))
        lease = next(lease for lease in self.block_manager.leases() if lease.request == name)
        blocks = self.others.pop(name)
        if stays:
            self.staged_kv.store(lease)
            self.kept[name] = blocks
        else:
            self.block_manager.free(lease)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.kept)))
        lease = self.staged_kv.claim(name)
        self.line = [ask for ask in self.line if ask[0] != name]
        assert lease.blocks == self.kept[name]
        self.others[name] = self.kept.pop(name)
        with pytest.raises(InvariantError, match="no KV is held"):
            self.staged_kv.claim(name)

    @precondition(lambda self: self.kept or self.line)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({*self.kept, *dict(self.line)})))
        assert self.staged_kv.release(name)
        assert not self.staged_kv.release(name)
        self.kept.pop(name, None)
        self.line = [ask for ask in self.line if ask[0] != name]

    @precondition(lambda self: any(is_span_kv(name) for name in self.kept))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(name for name in self.kept if is_span_kv(name))))
        request = name.removesuffix("/spans")
        blocks = self.kept.pop(name)
        self.line = [ask for ask in self.line if ask[0] != name]
        assert self.staged_kv.to_request(request)
        self.kept.setdefault(request, blocks)
        assert self.staged_kv.to_request(request)

    @precondition(lambda self: any(not is_span_kv(name) for name in self.kept))
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(name for name in self.kept if not is_span_kv(name))))
        runs = span_kv_name(request)
        if runs in self.kept:
            assert not self.staged_kv.to_span(request)
            return
        assert self.staged_kv.to_span(request)
        assert not self.staged_kv.to_span(request)
        self.line = [ask for ask in self.line if ask[0] != request]
        self.kept[runs] = self.kept.pop(request)

    @rule()
    def carry_out(self) -> None:
        for op in self.block_manager.drain_ops():
            self.replica.apply(op)
        held = {lease.request: self.block_manager.where(lease.request) for lease in self.block_manager.leases()}
        assert held == {name: self.replica.runs(name) for name in self.replica.owners()}
        self.replica.check()

    @rule()
    def lose(self) -> None:
        if self.named % 5 == 0:
            self.staged_kv.lost()
            self.kept, self.line = {}, []

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.block_manager.check()
        assert self.block_manager.free_blocks == self.free()
        assert {lease.request: lease.blocks for lease in self.block_manager.leases()} == {**self.kept, **self.others}
        assert set(self.staged_kv.names()) == set(self.kept)
        assert self.staged_kv.waiting == tuple(name for name, _ in self.line)


TestStagedKv = StagedKvMachine.TestCase
TestStagedKv.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True)


def test_pending_requests_are_served_whole_and_in_order() -> None:
    block_manager = BlockManager(64, 4)
    staged_kv = StagedKv(block_manager)
    other = present(block_manager.reserve("other", 32))
    staged_kv.request("large", 48, 0.0)
    staged_kv.request("small", 4, 1.0)
    assert staged_kv.admit() == []
    assert (staged_kv.lease("large"), staged_kv.lease("small"), block_manager.free_blocks) == (None, None, 8)
    assert not staged_kv.blocked(1.9, 2.0)
    assert staged_kv.blocked(2.0, 2.0)
    block_manager.free(other)
    assert staged_kv.admit() == ["large", "small"]
    assert not staged_kv.blocked(9.0, 2.0)


def test_requests_that_never_fit_or_are_computed_here_are_refused() -> None:
    block_manager = BlockManager(64, 4)
    staged_kv = StagedKv(block_manager)
    with pytest.raises(RequestError, match="65 tokens do not fit the KV cache of 64"):
        staged_kv.request("a", 65, 0.0)
    block_manager.reserve("b", 4)
    with pytest.raises(RequestError, match="b waits for room already, or is computed here"):
        staged_kv.request("b", 4, 0.0)


def test_kv_of_spans_becomes_the_requests_without_moving() -> None:
    block_manager = BlockManager(64, 4)
    staged_kv = StagedKv(block_manager)
    staged_kv.request(span_kv_name("a"), 10, 0.0)
    staged_kv.admit()
    lease = present(staged_kv.lease(span_kv_name("a")))
    runs = block_manager.where(lease.request)
    assert staged_kv.to_request("a")
    assert staged_kv.lease("a") is lease
    assert block_manager.where(lease.request) == runs
    assert block_manager.drain_ops() == (KvOp("reserve", "a/spans", 3), KvOp("reassign", "a", 0, before="a/spans"))
