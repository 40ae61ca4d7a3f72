"""The counts that are kept from step to step are those of a pass over all running requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.checked_tally import checked_decodes_of
from tests.helpers.unit_latency import small_machine

from headway.core.request import Request
from headway.policy.hosted.driver import RunningTally
from headway.policy.hosted.settings import VllmSettings
from headway.sim.spec import VllmSpec
from headway.sim.vllm.engine import PluggedPolicy
from headway.sim.vllm.scheduler import VllmRequestState, VllmScheduler


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 700), st.integers(1, 40)), min_size=1, max_size=40),
    st.integers(30, 200),
    st.booleans(),
    st.sets(st.integers(0, 39), max_size=8),
)
def test_kept_counts_are_those_of_a_pass_over_all_requests(
    arrivals: list[tuple[int, int, int]], blocks: int, asynchronous: bool, leave: set[int]
) -> None:
    spec = VllmSpec(num_blocks=blocks, max_num_batched_tokens=256, max_num_seqs=8, async_scheduling=asynchronous)
    scheduler = VllmScheduler(spec)
    plugged = PluggedPolicy(scheduler, VllmSettings().scheduler_config(8, 256, 1, 1), small_machine())
    kept: list[bool] = []
    flying: list[Any] = []
    now, waiting = 0.0, list(enumerate(arrivals))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningTally, "decodes_of", checked_decodes_of(kept))
        for step in range(2000):
            while waiting and waiting[0][1][0] <= step % 5:
                number, (_, prompt, output) = waiting.pop(0)
                if prompt + output + 1 < spec.longest_request:
                    facts = Request(id=f"r{number}", arrival_s=now, prompt_tokens=prompt, max_output_tokens=output)
                    scheduler.add(VllmRequestState(facts, output))
            name = f"r{step // 7}"
            if step % 7 == 0 and step // 7 in leave and name in scheduler.requests:
                scheduler.abort(name)
            flying.append(scheduler.schedule(now))
            now += 0.01
            if len(flying) > asynchronous:
                done = flying.pop(0)
                scheduler.update(done, now)
            if not (waiting or scheduler.requests):
                break
    assert not scheduler.requests
    assert plugged is scheduler.plugin
    # Not only counted anew each time.
    assert sum(kept) >= len(kept) // 3 or len(kept) < 30
