"""What a live cluster's controller knows of its instances' caches, and placements that follow it."""

from __future__ import annotations

import asyncio
import random
from array import array

import pytest
from tests.router import virtual_time
from tests.router.cluster_clients import ask, prompt, running
from tests.router.fake_instances import FakeCluster, answer

from headway.core.request import SamplingParams
from headway.kv.block_manager import BlockManager
from headway.kv.prefix_cache import PrefixCache
from headway.kv.text_keys import TextKeys
from headway.policy.placement.contract import Role
from headway.runtime.cluster.instances import CachedKeys, shareable, text_of
from headway.runtime.engine.protocol import ComputeSpan, SubmitRequest
from headway.runtime.engine.requests import take_changes

BLOCK = 16
"""Tokens of a block of the fake instances."""


def test_reports_of_an_instance_leave_the_controller_with_the_same_hits() -> None:
    rng = random.Random(1)
    cache = PrefixCache(4)
    cache.index.changes = {}
    manager, known = BlockManager(40 * 4, 4, cache), CachedKeys()
    evicted = 0
    for number in range(400):
        text = [rng.randrange(3) for _ in range(4 * rng.randrange(1, 9))]
        keys = TextKeys(array("i", text).tobytes(), 4).keys
        if rng.random() < 0.7:
            name = f"r{number}"
            cache.register(name, keys, len(text))
            lease = manager.reserve(name, len(text))
            assert lease is not None
            manager.note_computed(name, len(text))
            manager.free(lease)
            cache.forget(name)
        if rng.random() < 0.3 and (changes := take_changes(manager)) is not None:
            evicted += len(changes.evicted)
            known.take(changes)
            assert known.match(keys) == cache.index.match(keys).depth
    assert evicted
    known.clear()
    assert known.match(keys) == 0


def test_keys_of_a_request_are_those_that_it_may_share() -> None:
    def keys(told: int, **fields: object) -> int:
        params = SamplingParams(max_tokens=9, **fields.pop("params", {}))
        submit = SubmitRequest(
            id="a", prompt_tokens=32, params=params, received_s=0.0, output=tuple(range(told)), **fields
        )  # fmt: skip
        text = text_of(submit, array("i", range(32)).tobytes(), submit.output, BLOCK)
        return len(shareable(text, 32 + told, BLOCK))

    # The last token is always computed.
    assert [keys(told) for told in (0, 1, 16, 17)] == [1, 2, 2, 3]
    assert keys(1, prefix_cache=False) == 0
    assert keys(1, params={"prompt_logprobs": 1}) == 0


def places(affinity: bool) -> dict[str, int]:
    """Return where the turns of two conversations go, of which an instance each has begun one."""
    fake = FakeCluster(run_s=0.2, caches=True)

    async def run() -> None:
        async with running(fake, ("mixed", "mixed"), "jsq", {"affinity": affinity}) as client:
            first, second = prompt(1, 400), prompt(2, 400)
            await asyncio.gather(ask(client, "a", first), ask(client, "b", second))
            await ask(client, "b2", [*second, *prompt(3, 40)])
            await ask(client, "a2", [*first, *prompt(4, 40)])
            await ask(client, "b salted", second, cache_salt="tenant")
            fake.kill(1)
            await virtual_time.pause(0.5)
            await ask(client, "b3", [*second, *prompt(5, 40)])

    virtual_time.run(run())
    return {message.id: number for number, message in fake.log if isinstance(message, SubmitRequest)}


def test_jsq_with_affinity_follows_what_live_instances_have_cached() -> None:
    begun = {"a#1": 0, "b#1": 1, "a2#1": 0, "b salted#1": 0}
    # The process that had the second conversation's KV is gone, so that its instance has no advantage.
    assert places(True) == {**begun, "b2#1": 1, "b3#1": 0}
    assert places(False) == {**begun, "b2#1": 0, "b3#1": 0}


LONG = {"long_tokens": 50, "disaggregate": False, "long_replicas": "fixed", "long_sp": 1}


def turns(placement: str, options: dict[str, object], roles: tuple[Role, ...], evicts: int = 0) -> list[ComputeSpan]:
    """Return the first spans of a conversation's two turns, and of another one's, in order; each is answered."""
    fake = FakeCluster(run_s=0.01, kv_tokens=1 << 16, caches=True, evicts=evicts)

    async def run() -> None:
        async with running(fake, roles, placement, {"affinity": True, **options}) as client:
            first = prompt(1, 4000)
            told = await ask(client, "a", first, 40)
            assert told == answer(first, 40)
            second = [*first, *told, *prompt(2, 90)]
            submit = SubmitRequest(
                id="b",
                prompt_tokens=len(second),
                params=SamplingParams(max_tokens=4),
                received_s=virtual_time.loop_time(),
            )
            deltas = [delta async for delta in client.generate(submit, array("i", second).tobytes())]
            assert [token for delta in deltas for token in delta.tokens] == answer(second, 4)
            assert [delta.cached_tokens for delta in deltas] == [0 if evicts else 4000, *[0] * (len(deltas) - 1)]
            assert [delta.saved_s for delta in deltas] == [delta.cached_tokens / 1000 for delta in deltas]
            assert await ask(client, "c", second, 4, prefix_cache=False) == answer(second, 4)

    virtual_time.run(run())
    spans = {message.id: message for _, message in reversed(fake.log) if isinstance(message, ComputeSpan)}
    return [spans[name] for name in sorted(spans)]


@pytest.mark.parametrize(
    ("placement", "options", "roles"),
    [
        ("tetris", {"sizes": [1]}, ("mixed", "mixed")),
        ("tetris", {"sizes": [1, 2]}, ("mixed", "mixed")),
        ("pecsched", LONG, ("mixed",)),
    ],
)
def test_spans_begin_behind_what_an_instance_of_their_group_has_cached(
    placement: str, options: dict[str, object], roles: tuple[Role, ...]
) -> None:
    first, second, unshared = turns(placement, options, roles)
    assert (first.cached, first.run.start, first.before) == (False, 0, ())
    assert (second.cached, second.run.start) == (True, 4000)
    (prefix,) = second.before
    assert (prefix.start, prefix.end) == (0, 4000)
    assert (unshared.cached, unshared.run.start) == (False, 0)
    # Evicted meanwhile, or no room for a copy: the request begins again, without, and its client sees nothing of it.
    again = turns(placement, options, roles, evicts=1)
    assert [(message.id, message.cached) for message in again] == [
        ("a#1", False), ("b#1", True), ("b#2", False), ("c#1", False)
    ]  # fmt: skip
