"""The prefix index against a model that keeps every prefix as a tuple of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from tests.helpers.unit_latency import small_machine

from headway.core.errors import ConfigError, InvariantError
from headway.kv.prefix_index import PrefixIndex, PrefixNode
from headway.kv.text_keys import TextKeys
from headway.policy.iteration.admission import make_prefix_cache

Prefix = tuple[int, ...]
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


def prefixes(prompt: Prefix) -> list[Prefix]:
    return [prompt[: i + 1] for i in range(len(prompt))]


class IndexMachine(RuleBasedStateMachine):
    """Keys are the prefixes themselves, so that the model can tell which one a node stands for."""

    held = Bundle("held")

    @initialize(cost_aware=st.booleans())
    def start(self, cost_aware: bool) -> None:
        self.index = PrefixIndex((lambda depth: 1.0 + depth) if cost_aware else None)
        self.cost_aware = cost_aware
        self.cached: dict[Prefix, int] = {}
        self.users: list[Prefix] = []
        self.next_block = 0

    def longest(self, prompt: Prefix) -> Prefix:
        return max((p for p in prefixes(prompt) if p in self.cached), key=len, default=())

    @rule(target=held, prompt=PROMPTS)
    def compute(self, prompt: Prefix) -> tuple[Prefix, PrefixNode]:
        """Match, hold what is found, compute the rest and hold it too: the life of a request."""
        tip = self.index.match(prefixes(prompt))
        assert self.index.path(tip) == [self.cached[p] for p in prefixes(self.longest(prompt))]
        self.index.acquire(tip, self.index.runs(tip))
        rest = prefixes(prompt)[tip.depth :]
        blocks = list(range(self.next_block, self.next_block + len(rest)))
        self.next_block += len(rest)
        end = self.index.extend(tip, rest, blocks)
        self.index.advance(tip, end)
        self.cached.update(zip(rest, blocks, strict=True))
        self.users.append(prompt)
        return prompt, end

    @rule(entry=consumes(held))
    def finish(self, entry: tuple[Prefix, PrefixNode]) -> None:
        prompt, node = entry
        self.index.release(node)
        self.users.remove(prompt)

    @rule()
    def evict(self) -> None:
        used = {p for prompt in self.users for p in prefixes(prompt)}
        leaves = [p for p in self.cached if p not in used and not any(q[:-1] == p for q in self.cached)]
        node = self.index.evict()
        if not leaves:
            assert node is None
            return
        assert node is not None
        assert node.key in leaves
        if not self.cost_aware:
            by_prefix = {n.key: n for n in [*self.index.nodes(), node]}
            assert node.stamp == min(by_prefix[leaf].stamp for leaf in leaves)
        del self.cached[node.key]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        assert {node.key: node.block for node in self.index.nodes()} == self.cached
        used = {p for prompt in self.users for p in prefixes(prompt)}
        assert {node.key for node in self.index.nodes() if self.index.users(node)} == used
        assert self.index.evictable == len(self.cached) - len(used)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_a_prefix_released_more_often_than_acquired_is_an_error() -> None:
    index = PrefixIndex()
    node = index.extend(index.root, ["a"], [0])
    with pytest.raises(InvariantError, match="more often"):
        index.release(node)


def test_a_key_behind_two_prefixes_is_an_error() -> None:
    index = PrefixIndex()
    index.extend(index.root, ["a", "x"], [0, 1])
    with pytest.raises(InvariantError, match="two prefixes"):
        index.extend(index.root, ["b", "x"], [2, 3])


def test_the_cost_aware_policy_keeps_a_deep_prefix_and_lets_it_age() -> None:
    index = PrefixIndex(float)
    index.extend(index.root, [f"deep {i}" for i in range(4)], range(4))
    evicted = []
    for i in range(4):
        index.extend(index.root, [f"chat {i}"], [10 + i])
        victim = index.evict()
        assert victim is not None
        evicted.append(victim.key)
    # Chats of rank 1, 2, 3 go before the block of depth 4; the fourth chat has rank 4 and is younger.
    assert evicted == ["chat 0", "chat 1", "chat 2", "deep 3"]


def test_the_least_recently_used_prefix_goes_first() -> None:
    index = PrefixIndex()
    first, second = (index.extend(index.root, [name], [i]) for i, name in enumerate("ab"))
    for node in (second, first):
        index.acquire(node)
        index.release(node)
    assert [index.evict(), index.evict(), index.evict()] == [second, first, None]


def test_an_unknown_eviction_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="known are lru, cost"):
        make_prefix_cache("fifo", small_machine(), 16)


def test_keys_stand_for_whole_prefixes_and_for_a_salt() -> None:
    tokens = np.arange(70, dtype=np.int32)
    keys = TextKeys(tokens.tobytes(), 16).keys
    assert len(keys) == 4
    other = tokens.copy()
    other[20] = 99
    shared = TextKeys(other.tobytes(), 16).keys
    assert shared[0] == keys[0]
    assert not set(shared[1:]) & set(keys)
    assert not set(TextKeys(tokens.tobytes(), 16, "tenant").keys) & set(keys)
    assert TextKeys(tokens[:15].tobytes(), 16).keys == []


def test_stale_candidates_are_dropped_from_the_heap() -> None:
    index = PrefixIndex()
    node = index.extend(index.root, ["a"], [0])
    for _ in range(1000):
        index.acquire(node)
        index.release(node)
    assert len(index._leaves) < 200
