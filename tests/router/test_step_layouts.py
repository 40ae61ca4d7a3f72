"""What the router says of a decode's runs so far: whoever computes them again finds KV where it lies."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.decode_world import DecodeWorld

from headway.core.request import SpanTask, Strategy
from headway.runtime.engine.protocol import ComputeSpan, OutputDelta, SpanTaskDone
from headway.runtime.model.config import DecoderConfig, RopeConfig
from headway.runtime.sequence_parallel.layout import EMPTY, KvLayout, layout_after
from headway.runtime.sequence_parallel.spans import chunks_of

INSTANCES = 4
CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=101, hidden_size=64, layers=2, q_heads=8, kv_heads=2, head_dim=8,
    mlp_size=50, rms_eps=1e-5, rope=RopeConfig("default", 1e4, 8, 512), max_positions=512, max_model_len=512,
)  # fmt: skip


def lies(runs: list[SpanTask]) -> KvLayout:
    """After one run after the other."""
    held: KvLayout = EMPTY
    for run in runs:
        held = layout_after(chunks_of(run), held, CONFIG)
    return held


def same(one: KvLayout, other: KvLayout) -> bool:
    """Who holds nothing may be named or not."""
    filled = [{rank: held for rank, held in each.items() if len(held.positions)} for each in (one, other)]
    return filled[0].keys() == filled[1].keys() and all(
        held.heads == filled[1][rank].heads and np.array_equal(held.positions, filled[1][rank].positions)
        for rank, held in filled[0].items()
    )


def prefilled(chance: random.Random) -> list[SpanTask]:
    """A prompt of 100 tokens, in runs over groups of which each includes the one before."""
    edges = [0, *sorted(chance.sample(range(1, 100), chance.randint(0, 2))), 100]
    everybody = chance.sample(range(INSTANCES), INSTANCES)
    size, runs = 1, []
    for start, end in pairwise(edges):
        size = chance.randint(size, 3)
        strategy = Strategy(chance.choice(("ring", "striped")))
        runs.append(SpanTask(start, end, tuple(everybody[:size]), strategy, rows=chance.choice((0, 8))))
    return runs


@settings(max_examples=30)
@given(st.integers(0, 1 << 30))
def test_merged_decode_steps_describe_the_same_kv_layout(seed: int) -> None:
    chance = random.Random(seed)
    world = DecodeWorld(*[500] * INSTANCES)
    attempt, computed = world.attempt, prefilled(chance)
    attempt.runs, attempt.spread = list(computed), computed[-1].group
    attempt.admitted = set(attempt.spread)
    world.steps.begin(attempt)
    group = attempt.spread
    for _ in range(20):
        if chance.random() < 0.3:
            group = tuple(sorted(chance.sample(range(INSTANCES), chance.randint(1, INSTANCES))))
        for instance in world.fleet:
            cast(Any, instance.stats).kv_tokens_used = chance.choice((0, 0, 0, 400, 470))
        world.fleet.told.clear()
        world.steps.next(attempt, group)
        told = [(number, message) for number, message in world.fleet.told if isinstance(message, ComputeSpan)]
        (message,) = {id(message): message for _, message in told}.values()
        assert {number for number, _ in told} == set(message.run.group) == attempt.running
        if message.before:
            assert same(lies(list(message.before)), lies(computed))
        assert bool(message.before) == bool(set(message.run.group) - set(attempt.spread))
        computed.append(message.run)
        token(world, message)
        after = lies(computed)
        assert same(lies(attempt.steps), after)
        assert {rank for rank, held in after.items() if len(held.positions)} <= set(attempt.spread)
        assert sum(len(held.positions) for held in after.values()) == message.run.end
    assert len(attempt.steps) <= len(computed)


def token(world: Any, message: ComputeSpan) -> None:
    """All of the group have computed it."""
    for number in message.run.group:
        delta = OutputDelta(id="r", tokens=(7,)) if number == message.run.group[0] else None
        done = SpanTaskDone(id="r", index=message.index, began_s=0.0, ended_s=0.0, delta=delta)
        assert world.steps.done(number, world.attempt, done) == (number == message.run.group[-1])
