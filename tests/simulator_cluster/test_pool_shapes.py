"""A pool's instances with pipeline stages and KV groups take what one such instance alone takes."""

from __future__ import annotations

from typing import Any

import pytest

from headway.sim.build import run_scenario
from headway.sim.metrics import tbt_s, ttft_s
from headway.sim.result import SimResult
from headway.sim.scenario import parse_scenario


def lone_prompt(**fields: Any) -> SimResult:
    mix = [{"prompt": "fixed:300000", "output": "fixed:20"}]
    return run_scenario(parse_scenario({"workload": {"qps": 0.01, "requests": 1, "mix": mix}, **fields}), 0).sim


@pytest.mark.parametrize("placement", ["jsq", "ladder"])
@pytest.mark.parametrize("cut", [{"stages": 4}, {"kvp": 2}, {"tp": 2, "stages": 2, "kvp": 2}])
def test_a_lone_long_prompt_takes_as_long_in_a_cluster_as_on_one_instance(placement: str, cut: dict[str, int]) -> None:
    shards = {"shard_tokens": 100_000}
    (alone,) = lone_prompt(layout={**cut, **shards}).records
    pools = [{"count": 2, **cut}]
    (clustered,) = lone_prompt(cluster={"placement": placement, "pools": pools}, layout=shards).records
    assert ttft_s(clustered) == pytest.approx(ttft_s(alone))
    assert tbt_s(clustered) == pytest.approx(tbt_s(alone))
    (plain,) = lone_prompt(cluster={"placement": placement, "pools": [{"count": 2}]}).records
    assert ttft_s(clustered) < 0.8 * ttft_s(plain)
