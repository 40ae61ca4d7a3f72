"""Medha §4.1's worked example: one document of 10 s (deadline 16 s), two chats of 0.5 s at t=5 (deadline t=6).

Run on the real scheduler with iterations of 10 ms, one token each. Literal LARS misses both short deadlines: the paper
never states its outcome (DESIGN.md §4).
"""

from __future__ import annotations

import random

import pytest
from tests.helpers.unit_latency import Linear
from tests.scheduling.scheduler_world import World

from headway.core.request import Request, Slo
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.medha import MedhaConfig

QUANTUM_S = 0.01
LONG = Request(id="L", arrival_s=0.0, prompt_tokens=1000, max_output_tokens=1, slo=Slo(ttft_s=16.0))
SHORTS = [
    Request(id=name, arrival_s=4.995, prompt_tokens=50, max_output_tokens=1, slo=Slo(ttft_s=1.005))
    for name in ("S1", "S2")
]
"""They arrive during the iteration that ends at t=5, whatever the last digit of the clock."""
FINISH = {
    "fcfs": {"L": 10.0, "S1": 10.5, "S2": 11.0},
    "edf": {"L": 11.0, "S1": 5.5, "S2": 6.0},
    "srpt": {"L": 11.0, "S1": 5.5, "S2": 6.0},
    "lrs": {"L": 11.0, "S1": 6.0, "S2": 5.99},
    "lars": {"L": 11.0, "S1": 6.21, "S2": 6.20},
}


def finish_times(policy: str, chunking: str) -> dict[str, float]:
    config = SchedulerConfig.named(
        "paper",
        policy=policy,
        chunking=chunking,
        t_target_s=QUANTUM_S,
        medha=MedhaConfig(space_sharing=False, long_tokens=200),
    )
    plan = [(request, 1) for request in (LONG, *SHORTS)]
    world = World(random.Random(0), config, 1600, plan, noise=(1.0, 1.0), latency=Linear(QUANTUM_S))
    return world.run().finished


@pytest.mark.parametrize("chunking", ["static:1", "adaptive"])
@pytest.mark.parametrize("policy", FINISH)
def test_finish_times_match_the_worked_example_within_two_quanta(policy: str, chunking: str) -> None:
    found = finish_times(policy, chunking)
    assert found == {name: pytest.approx(at, abs=2 * QUANTUM_S + 1e-6) for name, at in FINISH[policy].items()}
    if chunking == "static:1":
        in_time = max(found["S1"], found["S2"]) <= 6.0 + 1e-6
        assert in_time == (policy not in ("fcfs", "lars")), "literal LARS misses both short deadlines"
    assert found["L"] <= 16.0
