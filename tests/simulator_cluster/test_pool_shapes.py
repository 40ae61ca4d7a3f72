"""A pool's instances with pipeline stages and KV groups take what one such instance alone takes."""

from __future__ import annotations

from typing import Any

import pytest

from headway.sim.build import run_scenario
from headway.sim.cluster.build import run_cluster
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


CHATS = {
    "engine": "vllm",
    "memory": {"kv_tokens": 20_000},
    "workload": {
        "qps": 8.0,
        "requests": 120,
        "mix": [{"prompt": "lognormal:median=2000,p90=6000", "output": "uniform:30-200"}],
    },
}


def test_vllm_servers_are_simulated_under_a_placement_with_their_own_blocks() -> None:
    alone = run_scenario(parse_scenario(CHATS), 0).sim
    one = run_scenario(parse_scenario({**CHATS, "cluster": {"placement": "jsq", "pools": [{"count": 1}]}}), 0).sim
    assert [record.token_s for record in one.records] == [record.token_s for record in alone.records]
    assert one.replicas[0].preemptions == alone.replicas[0].preemptions > 0
    for placement in ("jsq", "ladder"):
        cluster = {"placement": placement, "pools": [{"count": 3}]}
        three = run_scenario(parse_scenario({**CHATS, "cluster": cluster}), 0).sim
        assert all(record.ok and len(record.token_s) == record.output_tokens for record in three.records)
        assert all(use.iterations for use in three.replicas)
        assert three.duration_s < alone.duration_s


def test_the_ladder_gives_mixed_instances_whole_prompts_and_refuses_what_none_holds_as_live() -> None:
    mix = [{"prompt": f"fixed:{tokens}", "output": "fixed:9"} for tokens in (30_000, 60_000)]
    data = {"workload": {"qps": 0.01, "requests": 12, "mix": mix}, "memory": {"kv_tokens": 40_000}}
    for roles, grouped in ((["mixed"], False), (["prefill", "decode"], True)):
        pools = [{"count": 4, "role": role} | ({"kv_tokens": 80_000} if role == "decode" else {}) for role in roles]
        result = run_cluster(parse_scenario({**data, "cluster": {"pools": pools}}), 0)
        refused = [record for record in result.sim.records if not record.ok]
        assert (result.spans > 0) == grouped
        assert {record.prompt_tokens for record in refused} == ({60_000} if not grouped else set())
        for record in refused:
            assert "this cluster's instances hold requests of up to 40000" in str(record.error)
