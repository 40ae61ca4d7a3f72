"""Chunks of documents that arrivals interrupt between layers: exact, nothing lost, nothing computed twice."""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.helpers.embedded_engine import answers, engine, submit, token_bytes
from tests.helpers.marks import quick_first

from headway.core.request import BACKGROUND_PRIORITY, SamplingParams
from headway.runtime.embedded import model_path
from headway.runtime.engine.client import ProcessEngineClient
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import SubmitRequest
from headway.runtime.executor.single_process import SingleProcessExecutor
from headway.sim.replay import read_log, replay

LAYERS = 2


def text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(200) for _ in range(tokens)]


def computed_rows(core: EngineCore) -> list[int]:
    """Rows of each layer that is run from now on."""
    rows: list[int] = []
    decoder = core.executor.worker.decoder  # type: ignore[attr-defined]
    whole: Callable[..., None] = decoder.run_layer

    def run_layer(index: int, hidden: torch.Tensor, *others: object) -> None:
        rows.append(hidden.shape[0])
        whole(index, hidden, *others)

    decoder.run_layer = run_layer
    return rows


def test_an_interrupted_chunk_goes_on_with_the_next_layer() -> None:
    core, rng = engine(4096, prefix_cache=False), random.Random(1)
    assert isinstance(core.executor, SingleProcessExecutor)
    document, chat = text(rng, 300), text(rng, 40)
    plain = [answers(core, [prompt], 4)[0] for prompt in (document, chat)]
    events: list[tuple[str, dict[str, object]]] = []
    core._log = lambda kind, fields: events.append((kind, fields))
    rows, asked = computed_rows(core), [0]

    def arrived() -> bool:
        asked[0] += 1
        return asked[0] in (1, 3)

    core.executor.interrupts = arrived
    got: dict[str, list[int]] = {"document": [], "chat": []}
    submit(core, "document", document, 4, priority=BACKGROUND_PRIORITY)
    core.step()
    assert [kind for kind, _ in events if kind != "add"] == ["schedule", "interrupt"]
    assert core.scheduler.progress("document") == 0
    submit(core, "chat", chat, 4)
    while not core.idle:
        for delta in core.step():
            got[delta.id] += delta.tokens
    core.scheduler.check()
    assert [got["document"], got["chat"]] == plain
    # 4 tokens of output: 3 rows of decodes, for two requests.
    assert sum(rows) == LAYERS * (len(document) + len(chat) + 2 * 3)
    batches = [fields for kind, fields in events if kind == "batch"]
    assert sum(kind == "interrupt" for kind, _ in events) == 2
    assert len(batches) == len([kind for kind, _ in events if kind == "schedule"]) - 2
    core.executor.close()


@pytest.mark.parametrize("seed", quick_first(range(24), 6))
def test_answers_are_the_same_whatever_is_interrupted_aborted_or_evicted(seed: int) -> None:
    rng = random.Random(seed)
    core = engine(rng.choice((1024, 2048)), prefix_cache=seed % 2 == 0)
    shared = text(rng, 120)
    prompts = {
        f"{kind}{i}": rng.choice(([], shared)) + text(rng, rng.randint(1, most))
        for kind, count, most in (("document", 4, 500), ("chat", 12, 150))
        for i in range(count)
    }
    truth = dict(zip(prompts, (answers(core, [prompt], 6)[0] for prompt in prompts.values()), strict=True))
    stopped = [0]

    def arrived() -> bool:
        stop = rng.random() < 0.5
        stopped[0] += stop
        return stop

    assert isinstance(core.executor, SingleProcessExecutor)
    core.executor.interrupts = arrived
    waiting = list(prompts)
    rng.shuffle(waiting)
    got: dict[str, list[int]] = {name: [] for name in prompts}

    def step() -> None:
        for delta in core.step():
            got[delta.id] += delta.tokens
        core.scheduler.check()

    while waiting or not core.idle:
        if waiting and rng.random() < 0.4:
            name = waiting.pop()
            priority = BACKGROUND_PRIORITY if name.startswith("document") else 0
            submit(core, name, prompts[name], 6, priority=priority)
            if rng.random() < 0.15:
                step()
                if core.abort(name) is not None:
                    waiting.append(name)
                    got[name] = []
        step()
    assert stopped[0] > 0
    assert got == truth
    core.executor.close()


def test_a_document_that_is_dropped_while_it_is_interrupted_leaves_nothing() -> None:
    core, rng = engine(2048, prefix_cache=False), random.Random(3)
    assert isinstance(core.executor, SingleProcessExecutor)
    prompt = text(rng, 400)
    (plain,) = answers(core, [prompt], 4)
    core.executor.interrupts = lambda: True
    submit(core, "document", text(rng, 400), 4, priority=BACKGROUND_PRIORITY)
    core.step()
    assert core.executor.worker._interrupted
    core.abort("document")
    # The same id, other tokens, in the same blocks.
    core.executor.interrupts = None
    submit(core, "document", prompt, 4, priority=BACKGROUND_PRIORITY)
    got: list[int] = []
    while not core.idle:
        for delta in core.step():
            got += delta.tokens
    assert got == plain
    assert not core.executor.worker._interrupted
    core.executor.close()


@pytest.mark.long
def test_a_served_document_is_interrupted_by_chats_and_its_log_replays(tmp_path: Path) -> None:
    rng, log = random.Random(5), tmp_path / "log.jsonl"
    document, chats = text(rng, 8000), [text(rng, 30) for _ in range(8)]
    core = engine(16_384, prefix_cache=False)
    truth = [answers(core, [prompt], 4)[0] for prompt in (document, *chats)]
    core.executor.close()
    config = EngineConfig(
        model=str(model_path()), dtype="float32", device="cpu", kv_cache_bytes=16_384 * token_bytes(),
        event_log=str(log), latency_profile="quick",
    )  # fmt: skip
    client = ProcessEngineClient(config)

    async def ask(name: str, prompt: list[int], priority: int) -> list[int]:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        submit = SubmitRequest(
            id=name, prompt_tokens=len(prompt), params=params, received_s=time.monotonic(), priority=priority
        )
        deltas = client.generate(submit, array("i", prompt).tobytes())
        return [token async for delta in deltas for token in delta.tokens]

    async def test() -> None:
        try:
            await client.start()
            prepared = asyncio.create_task(ask("document", document, BACKGROUND_PRIORITY))
            asked = 0
            while not prepared.done():
                place = asked % len(chats)
                assert await ask(f"chat{asked}", chats[place], 0) == truth[1 + place]
                asked += 1
                await asyncio.sleep(0.01)
            assert await prepared == truth[0]
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(test(), 120))
    events = list(read_log(log))
    assert replay(events).differences == []
    assert sum(event["event"] == "interrupt" for event in events) > 0
