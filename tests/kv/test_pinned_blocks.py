"""Pinned prefixes beside random requests: never evicted, never lost from the counts, gone when they are let go."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.kv.block_manager import BlockManager, KvLease
from headway.kv.prefix_cache import PrefixCache
from headway.kv.prefix_index import PrefixNode

BLOCK = 4
POOL = 24
# A tree of texts: the key of a block is the path of letters to it.
TEXTS = [f"{a * 5}{b * n}" for a in "xy" for b in "pqr" for n in (0, 3, 6)]


def keys(text: str) -> list[str]:
    return [text[: i + 1] for i in range(len(text))]


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "pin", "unpin", "hold", "let go"]), st.integers(0, 99)), max_size=60
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_pinned_prefix_keeps_its_blocks_whatever_requests_do(steps: list[tuple[str, int]]) -> None:
    cache = PrefixCache(BLOCK)
    manager = BlockManager(POOL * BLOCK, BLOCK, cache)
    live: list[KvLease] = []
    pinned: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    # Prefixes that prompts outside of the scheduler copy: tips, with their blocks.
    held: list[tuple[PrefixNode, list[int]]] = []
    for number, (step, choice) in enumerate(steps):
        name, text = f"n{number}", TEXTS[choice % len(TEXTS)]
        if step == "begin":
            cache.register(name, keys(text), len(text) * BLOCK + 1)
            lease = manager.reserve(name, len(text) * BLOCK + 1)
            if lease is None:
                cache.forget(name)
            else:
                manager.note_computed(name, len(text) * BLOCK)
                live.append(lease)
        elif step == "end" and live:
            lease = live.pop(choice % len(live))
            manager.free(lease)
        elif step == "pin":
            depth = cache.pin(name, keys(text))
            pinned[name], texts[name] = cache.index.path(cache.index.match(keys(text)[:depth])), text[:depth]
        elif step == "unpin" and pinned:
            gone = sorted(pinned)[choice % len(pinned)]
            assert cache.unpin(gone)
            del pinned[gone], texts[gone]
        elif step == "hold":
            tip = cache.hold(keys(text))
            held.append((tip, cache.index.path(tip)))
        elif step == "let go" and held:
            cache.end(held.pop(choice % len(held))[0])
        manager.check()
        for tip, path in held:
            # Neither evicted nor given to another while it is copied.
            assert all(cache.index.users(node) for node in cache.index.nodes() if node.block in path)
            assert cache.index.path(tip) == path
            assert {node.block for node in cache.index.nodes()} >= set(path)
        assert cache.pinned == {each: len(blocks) for each, blocks in pinned.items()}
        for each, blocks in pinned.items():
            assert cache.index.path(cache.index.match(keys(texts[each]))) == blocks
    for lease in live:
        manager.free(lease)
    for tip, _ in held:
        cache.end(tip)
    manager.clear_cache()
    manager.check()
    assert len(cache.index) == 0
    assert manager.free_blocks == POOL


def test_an_unknown_pin_is_not_there() -> None:
    assert not PrefixCache(BLOCK).unpin("none")
