"""LoongServe's dynamic programming against every split, and what it dispatches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.request import Request
from headway.perf.latency.groups import GroupShape
from headway_research.loongserve.batching import (
    LoongServeOptions,
    PrefillBatch,
    ScalingTimes,
    dispatch,
    partition,
)


def seconds(tokens: int, sp: int, nodes: int) -> float:
    return 0.02 * sp * nodes + tokens * 1e-3 / sp + tokens * tokens * 1e-7 / sp


def batch_s(tokens: Sequence[int], sp: int, nodes: int) -> float:
    return sum(seconds(t, sp, nodes) for t in tokens) - (len(tokens) - 1) * seconds(1, sp, nodes)


def splits(n: int, count: int, i: int = 0, k: int = 0) -> Iterator[list[PrefillBatch]]:
    """Yield every split of prompts from i on into consecutive batches, on consecutive instances from k on."""
    if i == n:
        yield []
        return
    for last in range(i + 1, n + 1):
        for start, stop in combinations(range(k, count + 1), 2):
            for rest in splits(n, count, last, stop):
                yield [PrefillBatch(i, last, start, stop), *rest]


def value(found: Sequence[PrefillBatch], tokens: Sequence[int], room: Sequence[float], nodes: Sequence[int]) -> float:
    total = 0.0
    for b in found:
        mine = tokens[b.first : b.last]
        if sum(mine) > sum(room[b.start : b.stop]):
            return math.inf
        spread = len(set(nodes[b.start : b.stop]))
        total += batch_s(mine, b.stop - b.start, spread) * sum(1 / t for t in mine)
    return total


@given(
    tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=5),
    room=st.lists(st.sampled_from([500.0, 3000.0, 9000.0, 1e9]), min_size=1, max_size=5),
    most=st.sampled_from([0, 1, 2]),
    max_sp=st.sampled_from([0, 1, 3]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_partition_is_optimal_over_all_splits(tokens: list[int], room: list[float], most: int, max_sp: int) -> None:
    tokens = sorted(tokens, reverse=True)
    nodes = [i // 2 for i in range(len(room))]
    found = partition(tokens, room, nodes, seconds, most, max_sp)
    allowed = [
        split
        for split in splits(len(tokens), len(room))
        if all((not most or b.last - b.first <= most) and (not max_sp or b.stop - b.start <= max_sp) for b in split)
    ]
    # several splits may be optimal: costs are compared, not splits
    least = min((value(split, tokens, room, nodes) for split in allowed), default=math.inf)
    if found is None:
        assert least == math.inf
        return
    assert value(found, tokens, room, nodes) == pytest.approx(least)
    assert [b.first for b in found] == [0, *(b.last for b in found[:-1])]  # each prompt once, in order
    assert found[-1].last == len(tokens)
    assert all(a.stop <= b.start for a, b in pairwise(found))


def test_short_prompts_do_not_share_a_batch_with_a_long_one() -> None:
    found = partition([20_000, 200, 200], [1e9] * 4, [0] * 4, seconds)
    assert found is not None
    assert (found[0].first, found[0].last) == (0, 1)
    assert found[0].stop - found[0].start > 1
    assert partition([], [1.0], [0], seconds) == []
    assert partition([10], [], [], seconds) is None


class Fixed:
    source = "test"

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        return seconds(tokens, group.sp, group.nodes)

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        raise NotImplementedError


def request(tokens: int, name: str = "r", output: int = 10) -> Request:
    return Request(id=name, arrival_s=0.0, prompt_tokens=tokens, max_output_tokens=output)


def chosen(pending: Sequence[Request], decodes: Sequence[int] = (), used: int = 0, **options: object) -> list[str]:
    times = ScalingTimes(Fixed(), [0, 0, 0, 0], 0)
    found = dispatch(pending, times, LoongServeOptions(**options), instances=4, capacity=10_000, used=used,
        reserved=used,
                     decodes=decodes, mean_output=100.0)  # fmt: skip
    return [r.id for r in found]


def test_dispatch_keeps_to_order_memory_and_the_round() -> None:
    many = [request(1000, f"r{i}") for i in range(60)]
    assert chosen(many) == [f"r{i}" for i in range(len(chosen(many)))]
    assert len(chosen(many, round_s=0.5)) < len(chosen(many)) < 40  # KV holds 39 with their output
    assert chosen(many, prefill="single") == ["r0", "r1", "r2", "r3"]
    assert chosen([request(39_000, "big"), *many], round_s=1.0) == ["big"]  # the first goes whatever it takes
    assert chosen([request(50_000, "never")]) == []
    assert len(chosen(many, round_tokens=2500)) == 2


def test_prompts_wait_for_decodes_or_preempt_them() -> None:
    fresh, old = [1], [50_000] * 4
    assert chosen([request(1_500, "mid")], fresh, used=30_000) == ["mid"]  # one instance is nearly as fast as waiting
    assert (
        chosen([request(9_000, "long")], fresh, used=30_000) == []
    )  # not for long: a decode with one token loses too much
    assert chosen([request(9_000, "long")], old, used=31_000) == []  # KV does not hold both
    assert chosen([request(9_000, "long")], old, used=30_500) == ["long"]  # old ones lose next to nothing
    assert chosen([request(9_000, "long")], old, used=30_500, preempt=False) == []
