"""Whatever groups a policy gives a decode, and whoever is full: all of a group know alike where KV lies, and it is all
there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.random_weights import reference_config
from tests.router.decode_world import DecodeWorld

from headway.core.request import SpanTask, Strategy
from headway.runtime.engine.protocol import AbortRequest, ComputeSpan
from headway.runtime.sequence_parallel.layout import EMPTY, KvLayout, layout_after
from headway.runtime.sequence_parallel.spans import chunks_of

CONFIG = replace(reference_config(512), layers=2, hidden_size=32, q_heads=8, kv_heads=2, head_dim=4, mlp_size=24)
INSTANCES = 4
PROMPT = 600
FORMS = ("ring", "striped", "ulysses")


def plain(layout: KvLayout) -> dict[int, tuple[range, list[int]]]:
    return {rank: (held.heads, held.positions.tolist()) for rank, held in layout.items()}


def sizes(layout: KvLayout) -> dict[int, int]:
    """Slots of an instance's pool, each of which has all heads of a token."""
    return {rank: -(-len(held.positions) * len(held.heads) // CONFIG.kv_heads) for rank, held in layout.items()}


class _Instances:
    """What instances know of where the request's KV lies, as they would: from the runs that they took part in, or
    are told of."""

    def __init__(self, world: DecodeWorld) -> None:
        self.world = world
        self.held: dict[int, KvLayout] = {}

    def take(self) -> None:
        """What they have just been told."""
        before: dict[int, KvLayout] = {}
        run: SpanTask | None = None
        for number, message in self.world.registry.told:
            if isinstance(message, AbortRequest):
                self.held.pop(number, None)
            elif isinstance(message, ComputeSpan):
                run = message.run
                before[number] = self.held.get(number) or self.all(message.before)
        assert run is not None
        assert set(before) == set(run.group)
        known = [plain(layout) for layout in before.values()]
        assert all(each == known[0] for each in known), "they differ in who holds what"
        held = next(iter(before.values()))
        after = layout_after(chunks_of(run), held, CONFIG)
        self.check(run, held, after)
        for number in run.group:
            self.held[number] = after

    def all(self, runs: tuple[SpanTask, ...]) -> KvLayout:
        held = EMPTY
        for run in runs:
            held = layout_after(chunks_of(run), held, CONFIG)
        return held

    def check(self, run: SpanTask, before: KvLayout, after: KvLayout) -> None:
        there = np.zeros((run.end, CONFIG.kv_heads), dtype=int)
        for one in after.values():
            there[np.ix_(one.positions, np.array(one.heads))] += 1
        assert there.all(), "KV is missing"
        for number, one in before.items() if run.strategy.attn == "ulysses" else ():
            assert one.heads == after[number].heads
            assert np.array_equal(one.positions, after[number].positions[: len(one.positions)]), "it moved"
        had = sizes(before)
        for number, size in sizes(after).items():
            anew = number in before and before[number].heads != after[number].heads
            more = size if anew else size - had.get(number, 0)
            kept = not run.keepers or number in run.keepers
            if kept and more > 1:
                assert more <= self.world.registry.kv.free(number), "there was no room to lay it out anew"


@st.composite
def prompts(draw: st.DrawFn) -> list[SpanTask]:
    """Spans of a prompt on groups that grow."""
    order = draw(st.permutations(range(INSTANCES)))
    ends = sorted({*draw(st.lists(st.integers(1, PROMPT - 1), max_size=2)), PROMPT})
    runs, at, size = list[SpanTask](), 0, draw(st.sampled_from([1, 2, 4] if len(ends) > 1 else [2, 4]))
    for end in ends:
        form = Strategy(draw(st.sampled_from(FORMS)))
        node = 2 if size == 4 and form.attn == "ulysses" and draw(st.booleans()) else None
        runs.append(SpanTask(at, end, tuple(order[:size]), form, node, rows=draw(st.sampled_from([0, 64]))))
        at, size = end, draw(st.sampled_from([n for n in (2, 4) if n >= size]))
    return runs


GROUPS = st.lists(st.integers(0, INSTANCES - 1), min_size=2, max_size=INSTANCES, unique=True).map(tuple)
EVENTS = st.one_of(
    st.none(),
    st.none(),
    GROUPS,
    st.tuples(st.just("room"), st.integers(0, INSTANCES - 1), st.sampled_from([0, 100, 250, 500])),
)


@settings(max_examples=150)
@given(prompts(), GROUPS, st.lists(EVENTS, max_size=14))
def test_all_instances_of_a_group_agree_on_the_kv_layout(
    runs: list[SpanTask], group: tuple[int, ...], events: list[Any]
) -> None:
    world = DecodeWorld(*[500] * INSTANCES, prompt=PROMPT)
    attempt, instances = world.attempt, _Instances(world)
    attempt.runs, attempt.admitted = list(runs), {number for run in runs for number in run.group}
    for index, run in enumerate(runs):
        for number in run.group:
            instances.held[number] = instances.all(tuple(runs[: index + 1]))
    attempt.spread = runs[-1].group
    world.stays.enter(attempt, group, "decode")
    instances.take()
    for event in [*events, None, None]:
        if event is None:
            world.token()
            instances.take()
        elif event[0] == "room":
            cast(Any, world.registry[event[1]].info).kv_tokens_total = event[2]
        else:
            world.wants(*event)
