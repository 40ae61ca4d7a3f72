"""Block manager: leases are stable, counts agree, and its operations rebuild its tables in an executor."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from tests.helpers.present import present

from headway.core.errors import ConfigError, InvariantError
from headway.kv.allocator import BlockTables
from headway.kv.block_manager import BlockManager, KvLease

BLOCKS, BLOCK = 20, 4


class BlockManagerMachine(RuleBasedStateMachine):
    """Random reserve, grow and free; a replica replays the operations in batches of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.block_manager = BlockManager(BLOCKS * BLOCK, BLOCK)
        self.replica = BlockTables(BLOCKS)
        self.blocks: dict[str, int] = {}
        self.named = 0

    leases = Bundle("leases")

    def free(self) -> int:
        return BLOCKS - sum(self.blocks.values())

    @rule(target=leases, tokens=st.integers(0, 40), headroom=st.integers(0, 6))
    def reserve(self, tokens: int, headroom: int) -> KvLease | None:
        name = f"r{self.named}"
        self.named += 1
        need = max(1, -(-tokens // BLOCK))
        fits = need + headroom <= self.free()
        lease = self.block_manager.reserve(name, tokens, headroom)
        assert (lease is not None) == fits
        if lease is not None:
            self.blocks[name] = need
            assert lease.tokens >= tokens
        return lease

    @rule(lease=leases, tokens=st.integers(0, 80))
    def grow(self, lease: KvLease | None, tokens: int) -> None:
        if lease is None:
            return
        before = lease.tokens
        more = max(0, -(-tokens // BLOCK) - self.blocks[lease.request])
        fits = more <= self.free()
        assert self.block_manager.grow(lease, tokens) == fits
        self.blocks[lease.request] += more if fits else 0
        assert lease.tokens == max(before, -(-tokens // BLOCK) * BLOCK) if fits else lease.tokens == before

    @rule(lease=consumes(leases))
    def give_back(self, lease: KvLease | None) -> None:
        if lease is not None:
            self.block_manager.free(lease)
            del self.blocks[lease.request]
            with pytest.raises(InvariantError):
                self.block_manager.free(lease)
            with pytest.raises(InvariantError):
                self.block_manager.grow(lease, 1)

    @rule()
    def carry_out(self) -> None:
        for op in self.block_manager.drain_ops():
            self.replica.apply(op)
        held = {lease.request: self.block_manager.where(lease.request) for lease in self.block_manager.leases()}
        assert held == {name: self.replica.runs(name) for name in self.replica.owners()}
        self.replica.check()

    @invariant()
    def counts_agree(self) -> None:
        self.block_manager.check()
        assert self.block_manager.free_blocks == self.free()
        assert self.block_manager.used_tokens == sum(self.blocks.values()) * BLOCK
        assert {lease.request: lease.blocks for lease in self.block_manager.leases()} == self.blocks


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=60, stateful_step_count=40)


def test_freed_lease_cannot_change_a_later_lease_of_the_same_request() -> None:
    block_manager = BlockManager(64, 4)
    old = present(block_manager.reserve("a", 4))
    block_manager.free(old)
    new = present(block_manager.reserve("a", 4))
    with pytest.raises(InvariantError, match="lease of a"):
        block_manager.free(old)
    with pytest.raises(InvariantError, match="lease of a"):
        block_manager.grow(old, 8)
    block_manager.check()
    assert list(block_manager.leases()) == [new]
    block_manager.free(new)
    assert block_manager.free_blocks == block_manager.n_blocks


def test_a_second_lease_for_the_same_request_is_an_error() -> None:
    block_manager = BlockManager(64, 4)
    block_manager.reserve("a", 4)
    with pytest.raises(InvariantError, match="a has a lease already"):
        block_manager.reserve("a", 4)
    block_manager.check()


@pytest.mark.parametrize(("tokens", "block"), [(10, 16), (16, 0), (0, 1)])
def test_a_pool_that_cannot_be_cut_into_blocks_is_refused_with_the_numbers(tokens: int, block: int) -> None:
    with pytest.raises(ConfigError, match=f"{tokens} tokens cannot be cut into blocks of {block}"):
        BlockManager(tokens, block)


def test_a_partial_block_at_the_end_is_not_used() -> None:
    block_manager = BlockManager(67, 4)
    assert (block_manager.n_blocks, block_manager.total_tokens) == (16, 64)


@pytest.mark.parametrize("field", ["blocks", "tokens"])
def test_check_notices_a_lease_with_wrong_counts(field: str) -> None:
    block_manager = BlockManager(64, 4)
    lease = present(block_manager.reserve("a", 9))
    setattr(lease, field, getattr(lease, field) + 1)
    with pytest.raises(InvariantError, match="lease of a"):
        block_manager.check()


def test_check_notices_blocks_without_a_lease() -> None:
    block_manager = BlockManager(64, 4)
    block_manager.reserve("a", 9)
    block_manager._leases.clear()
    with pytest.raises(InvariantError, match="owners and leases differ"):
        block_manager.check()
