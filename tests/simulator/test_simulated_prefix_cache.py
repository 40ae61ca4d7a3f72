"""Simulated prefix caches: hits as brute force finds them, decisions as the engine's, sessions in closed loop."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields
from tests.helpers.unit_latency import small_machine

from headway.core.batch import Batch
from headway.core.errors import ConfigError
from headway.core.request import Span
from headway.kv.block_manager import BlockManager
from headway.kv.text_keys import TextKeys
from headway.policy.iteration.admission import make_prefix_cache
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.scheduler import Scheduler
from headway.sim import InstanceSpec, RunSpec, simulate
from headway.sim.loop import EventKind, InstanceSimulation
from headway.sim.prefix_cache import INFINITE, PrefixCacheSpec
from headway.sim.scenario import parse_scenario
from headway.sim.workload import TraceRequest, transforms
from headway.sim.workload.generate import PoissonArrivals
from headway.sim.workload.traces import PromptText, with_session_texts

BLOCK = 16


def sessions(rng: random.Random, count: int, apart_s: float) -> list[TraceRequest]:
    """Return requests of two sessions with two threads each; `apart_s`: mean time between arrivals."""
    requests: list[TraceRequest] = []
    at_s = 0.0
    prompts: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(count):
        session = rng.choice("ab")
        before = prompts[session]
        longest = rng.choice(before) if before and rng.random() < 0.8 else 0
        shared = rng.choice((longest, longest - longest % BLOCK, rng.randint(0, longest)))
        prompt = max(1, shared + rng.randint(0, 120))
        at_s += rng.expovariate(1 / apart_s)
        requests.append(
            TraceRequest(
                at_s, prompt, rng.randint(1, 40), cached_tokens=min(shared, prompt), session=session,
                thread=rng.choice("xy"), think_s=rng.random() * apart_s,
            )
        )  # fmt: skip
        before.append(prompt)
    # what is cached is left to the simulated cache
    return [replace(request, cached_tokens=0) for request in with_session_texts(requests, BLOCK)]


def tokens_of(text: PromptText) -> list[int]:
    """Return a text as token ids: equal where its pieces are equal."""
    tokens: list[int] = []
    for end, piece in text.pieces:
        tokens += [1000 * piece + place % 1000 for place in range(len(tokens), end)]
    return tokens


def cached_instance(kv_tokens: int, cache: PrefixCacheSpec | None, policy: str = "lars") -> InstanceSpec:
    config = SchedulerConfig(policy=policy)
    return InstanceSpec(
        config=config, latency=small_machine(), kv_tokens=kv_tokens, block_tokens=BLOCK, prefix_cache=cache
    )


SEEDS = st.integers(0, 2**32)


def shared(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_hits_of_an_infinite_cache_are_those_of_brute_force(seed: int) -> None:
    # so far apart that each request meets the KV of all before it
    workload = sessions(random.Random(seed), 20, 1e6)
    result = simulate(cached_instance(100_000, PrefixCacheSpec(tokens=INFINITE)), workload)
    before: list[list[int]] = []
    for record, source in zip(result.records, workload, strict=True):
        assert source.text is not None
        assert record.ok
        mine = tokens_of(source.text)
        best = max((shared(mine[: source.prompt_tokens - 1], other) for other in before), default=0)
        assert record.cached_tokens == best - best % BLOCK
        # the last output token's KV is never computed; an answer that no later prompt repeats shares nothing
        before.append(mine[: source.prompt_tokens + source.output_tokens - 1])
    use = result.replicas[0].prefix_cache
    assert use is not None
    assert use.hit_tokens == sum(record.cached_tokens for record in result.records)
    assert use.queried_tokens == sum(source.prompt_tokens for source in workload)


class RecordedScheduler:
    """Forwards to a scheduler and keeps each call with its result."""

    def __init__(self, scheduler: Any, calls: list[tuple[str, tuple[Any, ...], Any]]) -> None:
        self._scheduler, self._calls = scheduler, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._scheduler, name)
        if name not in ("add", "schedule", "complete", "abort"):
            return found

        def call(*arguments: Any) -> Any:
            result = found(*arguments)
            self._calls.append((name, arguments, result))
            return result

        return call


def emitted(batch: Batch) -> list[str]:
    """Requests that get a token of a batch of one iteration."""
    part = batch.parts[0]
    return [*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)]


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.sampled_from(("lru", "cost")), st.sampled_from((None, 600)), st.sampled_from(("lars", "fcfs", "srpt")))
def test_the_engine_decides_as_its_simulation_did(seed: int, eviction: str, size: int | None, policy: str) -> None:
    """Replay a simulation's calls into the engine's scheduler, with keys hashed from tokens as the engine does."""
    workload = sessions(random.Random(seed), 25, 0.05)
    spec = cached_instance(1200, PrefixCacheSpec(tokens=size, eviction=eviction), policy)
    simulation = InstanceSimulation(spec, workload, RunSpec(fast_forward=False), None)
    calls: list[tuple[str, tuple[Any, ...], Any]] = []
    replica: Any = simulation.replicas[0]
    replica.scheduler = RecordedScheduler(replica.scheduler, calls)
    simulation.run_events()

    cache = make_prefix_cache(eviction, spec.latency, BLOCK, None if size is None else size // BLOCK)
    live = Scheduler(spec.config, spec.latency, BlockManager(spec.kv_tokens, BLOCK, cache))
    texts: dict[str, TextKeys] = {}
    answers: dict[str, list[int]] = {}
    batches: dict[int, Batch] = {}
    for name, arguments, result in calls:
        if name == "add":
            request = arguments[0].request
            source = workload[int(request.id.removeprefix("r"))]
            assert source.text is not None
            whole = tokens_of(source.text.and_then(source.prompt_tokens + source.output_tokens, 10**6 + len(texts)))
            prompt = np.array(whole[: source.prompt_tokens], dtype="<i4").tobytes()
            texts[request.id] = TextKeys(prompt, BLOCK)
            answers[request.id] = whole[: source.prompt_tokens - 1 : -1]
            hit = cache.register(request.id, texts[request.id].keys, source.prompt_tokens)
            assert hit == request.cached_tokens
            live.add(Span.whole(with_fields(request, cached_tokens=hit)), *arguments[1:])
        elif name == "schedule":
            batch = live.schedule(*arguments)
            assert batch == result
            if batch is not None:
                batches[batch.id] = batch
        elif name == "complete":
            for request_id in emitted(batches[arguments[0]]):
                if answers[request_id]:
                    texts[request_id].append(answers[request_id].pop())
            assert live.complete(*arguments) == result
    live.check()
    assert len(texts) == 25


def test_a_cache_of_no_size_changes_nothing() -> None:
    workload = sessions(random.Random(3), 20, 0.1)
    plain = simulate(cached_instance(4000, None), workload)
    none = simulate(cached_instance(4000, PrefixCacheSpec(tokens=0)), workload)
    assert none == plain
    assert plain.replicas[0].prefix_cache is None


def test_a_larger_cache_never_computes_more_and_its_spare_blocks_hold_no_requests() -> None:
    workload = sessions(random.Random(5), 60, 1e4)
    computed = []
    for tokens in (0, 200, 800, INFINITE):
        result = simulate(cached_instance(800, PrefixCacheSpec(tokens=tokens)), workload)
        assert result.replicas[0].kv_peak_tokens <= 800
        computed.append(result.replicas[0].prefill_tokens)
    assert computed == sorted(computed, reverse=True)
    assert computed[0] > computed[-1]


def closed(seed: int, count: int = 30) -> list[TraceRequest]:
    rng = random.Random(seed)
    return transforms.close_sessions(sessions(rng, count, 1.0), PoissonArrivals(1.0), np.random.default_rng(seed))


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_turn_comes_after_the_answer_and_the_think_time(replicas: int) -> None:
    workload = closed(1)
    spec, run = cached_instance(20_000, PrefixCacheSpec()), RunSpec(replicas=replicas)
    result = simulate(spec, workload, run)
    assert result == simulate(spec, workload, run)
    assert len(result.records) == 30
    assert all(record.ok for record in result.records)
    by_prompt = {id(source): source for source in workload}
    assert len(by_prompt) == 30
    simulation = InstanceSimulation(spec, workload, run, None)
    simulation.run_events()
    threads: dict[tuple[str | None, str], list[Any]] = {}
    for track in simulation.tracks:
        threads.setdefault((track.source.session, track.source.thread), []).append(track)
    turns = 0
    for tracks in threads.values():
        for before, after in pairwise(tracks):
            assert after.request.arrival_s == before.ended_s + after.source.think_s
            turns += 1
    assert turns == sum(request.waits for request in workload) > 20


def test_fast_forward_changes_nothing_in_closed_loop() -> None:
    for seed in range(20):
        workload, spec = closed(seed), cached_instance(1500, PrefixCacheSpec())
        fast = simulate(spec, workload, RunSpec(patience_s=3.0, seed=seed))
        slow = simulate(spec, workload, RunSpec(patience_s=3.0, seed=seed, fast_forward=False))
        assert fast.records == slow.records


def test_the_next_turn_is_the_last_kind_of_event_at_an_instant() -> None:
    assert max(EventKind) is EventKind.NEXT_TURN


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"prefix_cache": {"size": "40 GX"}}, "must be pool, infinite, a number of tokens, or a memory such as 40 GiB"),
        ({"prefix_cache": {"eviction": "fifo"}}, "prefix_cache.eviction must be 'lru' or 'cost'"),
        ({"prefix_cache": {}, "layout": {"kvp": 2}}, "`prefix_cache` is of Headway's own engine with one KV group"),
        ({"workload": {"preset": "medha-swe", "sessions": {}}}, "`sessions` needs a trace"),
    ],
)
def test_bad_sections_say_what_is_allowed(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_scenario({"workload": {"preset": "medha-swe"}, **section})
    assert words in str(error.value)


def test_sizes_are_tokens_memory_or_unlimited() -> None:
    def tokens(size: Any) -> int | None:
        section = parse_scenario({"workload": {"preset": "medha-swe"}, "prefix_cache": {"size": size}}).prefix_cache
        assert section is not None
        return section.tokens(131_072)

    assert [tokens(size) for size in (0, 5000, "1.5 GiB", "pool", "infinite")] == [0, 5000, 12_288, None, INFINITE]
