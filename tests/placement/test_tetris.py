"""Tetris as a policy: rates by load, decode placement by freeness, and whole runs on a simulated cluster."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from tests.helpers.cluster_worlds import TETRIS_CONTEXT, TETRIS_LINKS

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.policy.placement.contract import (
    ClusterInstance,
    ClusterSnapshot,
    ClusterState,
    CommitSpans,
    RateControl,
    RateTable,
    RequestArrived,
    TransferKv,
    load_rates,
)
from headway.policy.placement.kv_places import DecodePlacement
from headway.policy.placement.registry import make_placement


def book(prefill: int = 16, decode: int = 2) -> ClusterState:
    first = [ClusterInstance(id=i, node=i // 8, role="prefill") for i in range(prefill)]
    rest = [ClusterInstance(id=prefill + i, node=9 + i, role="decode", tp=8, capacity=100_000) for i in range(decode)]
    return ClusterState((*first, *rest), TETRIS_LINKS)


def request(tokens: int, name: str = "r0", output: int = 10) -> Request:
    return Request(id=name, arrival_s=0.0, prompt_tokens=tokens, max_output_tokens=output)


def test_plan_becomes_nested_spans_with_transfers() -> None:
    state = book()
    for i in range(8, 16):  # the gap of §2.4's last example, wider
        state.put(msgspec.structs.replace(state.instances[i], free_at_s=9.0))
    for i in (16, 17):
        state.put(msgspec.structs.replace(state.instances[i], capacity=200_000))
    policy = make_placement("tetris", TETRIS_CONTEXT, {"rate": 0.05})
    commit, *transfers = policy.on_event(RequestArrived(request(131_072)), ClusterSnapshot(state, 8.0))
    assert isinstance(commit, CommitSpans)
    assert len(commit.spans) > 1
    assert (commit.spans[0].start, commit.spans[-1].end) == (0, 131_072)
    assert all(a.end == b.start and set(a.group) < set(b.group) for a, b in pairwise(commit.spans))
    # one transfer for each span, all to the decode instance chosen at the commit
    assert transfers == [TransferKv("r0", 16, index) for index in range(len(commit.spans))]
    single = make_placement("tetris", TETRIS_CONTEXT, {"rate": 0.05, "single_chunk": True})
    alone = single.on_event(RequestArrived(request(131_072, output=1)), ClusterSnapshot(state, 8.0))
    assert [len(action.spans) for action in alone if isinstance(action, CommitSpans)] == [1]
    assert len(alone) == 1


def test_improvement_rate_follows_the_load_and_can_be_replaced() -> None:
    state = book()
    control = RateControl(RateTable(points=((0.5, 0.1), (1.0, 0.3), (1.5, 0.6))), window_s=30.0, refresh_s=30.0)
    rates = []
    for second in range(121):
        for k in range(1 if second < 60 else 3):
            if second % 2 == 0:
                state.arrived(second + 0.1 * k)
        rates.append(control.rate(ClusterSnapshot(state, float(second) + 0.5)))
    assert rates[59] == 0.1
    assert rates[-1] == 0.6
    assert sum(a != b for a, b in pairwise(rates)) <= 3  # only when refreshed
    control.replace(RateTable(points=((0.0, 0.42),)))
    assert control.rate(ClusterSnapshot(state, 121.0)) == 0.42


def test_bad_rate_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    with pytest.raises(ConfigError, match="cannot read"):
        load_rates(file)
    file.write_text('{"points": [[1.0, 1.5]], "schema": "headway.tetris-rates/1"}')
    with pytest.raises(ConfigError, match="not a load"):
        load_rates(file)


def test_decode_instance_has_most_free_slots_per_running_request() -> None:
    state, decodes = book(), DecodePlacement()
    view = ClusterSnapshot(state, 0.0)
    assert decodes.choose(view) == 16
    decodes.place(request(60_000), [(0,)], view)
    assert decodes.choose(view) == 17  # KV on its way counts as used
    state.put(msgspec.structs.replace(state.instances[17], used=50_000, running=4))
    assert decodes.choose(ClusterSnapshot(state, 0.0)) == 16  # 40,000 for no running request, 50,000 for four
    decodes.withdraw("r0")
    assert decodes.freeness(view, 16) == 100_000
