"""Prompts whose KV is prepared and pinned: kept from eviction, computed after all other work, never in others' way."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tests.engine.embedded_engine import BLOCK, answers, engine, submit

from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import OutputDelta

POOL = 4096


@pytest.fixture
def core() -> Iterator[EngineCore]:
    made = engine(POOL, prefix_cache=True)
    yield made
    made.executor.close()


def text(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(tokens)]


def run(core: EngineCore) -> list[OutputDelta]:
    deltas = core.step()
    while not core.idle:
        deltas += core.step()
    core.scheduler.check()
    return deltas


def prepare(core: EngineCore, name: str, prompt: list[int]) -> list[OutputDelta]:
    submit(core, name, prompt, 1, pin=True, priority=9)
    return run(core)


def hit(core: EngineCore, prompt: list[int]) -> int:
    submit(core, "question", prompt, 1)
    return max(delta.cached_tokens for delta in run(core))


def test_a_prepared_document_survives_any_number_of_other_prompts(core: EngineCore) -> None:
    document = text(0, 1000)
    deltas = prepare(core, "doc", document)
    assert {(delta.id, delta.tokens, delta.finish) for delta in deltas} == {("doc", (), None)}
    computed = [delta.prefilled_tokens for delta in deltas]
    assert computed == sorted(computed)
    assert len(computed) > 5
    assert computed[-1] == 1000
    for seed in range(1, 9):
        answers(core, [text(seed, 2000)])
    assert hit(core, [*document, 1, 2, 3]) == 1000 // BLOCK * BLOCK
    core.abort("doc")
    for seed in range(9, 17):
        answers(core, [text(seed, 2000)])
    assert hit(core, [*document, 1, 2, 3]) == 0


def test_the_end_of_a_pin_is_told_when_all_kv_is_lost(core: EngineCore) -> None:
    document = text(0, 500)
    prepare(core, "doc", document)
    core.executor.recover = lambda: None  # type: ignore[method-assign]
    core._recover_from_loss("worker 1 has ended")
    (end,) = core.step()
    assert (end.id, end.finish, end.error) == ("doc", "abort", "its KV was lost with a worker")
    assert hit(core, [*document, 1, 2, 3]) == 0


def test_it_is_computed_after_all_other_work(core: EngineCore) -> None:
    submit(core, "doc", text(0, 1500), 1, pin=True, priority=9)
    core.step()
    for i in range(6):
        submit(core, f"chat{i}", text(i + 1, 100), 2)
    order = [delta.id for delta in run(core) if delta.finish or delta.id == "doc"]
    assert order[-1] == "doc"


def test_a_request_that_needs_the_memory_of_a_pin_gets_it(core: EngineCore) -> None:
    prepare(core, "doc", text(0, 1900))
    submit(core, "long", text(1, 3500), 4)
    deltas = run(core)
    (end,) = [delta for delta in deltas if delta.id == "doc"]
    assert end.finish == "abort"
    assert end.error == "its KV made way for a request that needs the memory"
    assert [delta.finish for delta in deltas if delta.id == "long"][-1] == "length"


def test_pins_hold_no_more_than_half_of_the_pool(core: EngineCore) -> None:
    deltas = prepare(core, "doc", text(0, 2500))
    assert [(delta.finish, delta.error) for delta in deltas][-1] == (
        "abort", "its KV is cached but not pinned: there is too little memory",
    )  # fmt: skip
    assert hit(core, [*text(0, 2500), 7]) == 2500 // BLOCK * BLOCK


def test_a_document_that_is_dropped_while_it_is_computed_is_not_pinned(core: EngineCore) -> None:
    submit(core, "doc", text(0, 1000), 1, pin=True)
    core.step()
    core.abort("doc")
    run(core)
    cache = core.scheduler.block_managers[0].cache
    assert cache is not None
    assert cache.pinned == {}
    assert cache.index.in_use == 0
