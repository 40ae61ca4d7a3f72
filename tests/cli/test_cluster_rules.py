"""Errors and warnings for started instances that cannot do what the cluster's policy needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.engine_fixtures import INFO as FAKE
from tests.helpers.latency_models import table

from headway.core.errors import ConfigError
from headway.core.request import Strategy
from headway.perf.hardware import ParallelLayout
from headway.perf.latency import eq1
from headway.perf.latency.corrected import describe
from headway.perf.latency.groups import GroupShape, RingLatency
from headway.policy.placement.pecsched_replicas import StrategyChooser
from headway.policy.placement.registry import names
from headway.runtime.assembly.cluster import check_moves, links, live_rules, policy_context, rules_of, shape_of
from headway.runtime.cluster.cluster_file import ClusterFile, InstancePool, cluster_file
from headway.runtime.cluster.driver import ClusterRules
from headway.runtime.engine.protocol import EngineInfo

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}  # fmt: skip


TABLE = table([(0, 1e-3), (1000, 11e-3)], [(0, 0.0, 0.0), (1000, 5e-4, 1e-6)], (0.0, 0.0, 0.0))
APART = (InstancePool(role="prefill"), InstancePool(role="decode"))
INFO = msgspec.structs.replace(FAKE, device="cuda", kv_tokens_total=512, kv_block_tokens=8)
MOVES = msgspec.structs.replace(INFO, peer_address="unix:p")


@pytest.mark.parametrize(
    ("file", "whole"),
    [
        (ClusterFile(pools=APART, placement="tetris"), False),
        (ClusterFile(pools=APART, placement="fifo", options={"long_sp": 1}), False),
        (ClusterFile(pools=(InstancePool(),), placement="tetris"), False),
        (ClusterFile(pools=(InstancePool(),), placement="fifo", options={"long_sp": 1}), True),
        (ClusterFile(pools=(InstancePool(),)), True),
    ],
)
def test_an_instance_whose_kv_does_not_move_serves_whole_requests_only(file: ClusterFile, whole: bool) -> None:
    check_moves(file, [MOVES, MOVES])
    if whole:
        check_moves(file, [MOVES, INFO])
        return
    with pytest.raises(ConfigError, match="instance 1 computes on cuda: KV moves between pools in host memory only"):
        check_moves(file, [MOVES, INFO])


def test_policies_use_the_latency_of_the_first_prefill_instance(tmp_path: Path) -> None:
    """A decode instance may have another layout, whose latency and ring traffic do not apply to prefill."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file = ClusterFile(
        pools=(InstancePool(role="decode", count=2), InstancePool(role="prefill"), InstancePool(role="mixed")),
        placement="tetris",
    )
    tables = [
        table([(1, row_s), (64, 64 * row_s)], [(0, 0.0, 0.0), (64, 0.0, 1e-12)], (0.0, 0.0, 0.0))
        for row_s in (1e-6, 2e-6, 3e-6, 4e-6)
    ]
    infos = [
        msgspec.structs.replace(INFO, latency=describe(each), layout=f"tp{2**i}-pp1-kvp1")
        for i, each in enumerate(tables)
    ]
    latency = rules_of(file, str(tmp_path), infos).latency
    between = links(file)
    wanted = RingLatency(tables[2], shape_of(str(tmp_path)), between.inside, between.across, 4, step_s=0.0)
    for group in (GroupShape(1), GroupShape(2, strategy=Strategy("ring"))):
        assert latency.prefill_s(0, 1 << 20, group) == wanted.prefill_s(0, 1 << 20, group)
    other = RingLatency(tables[2], shape_of(str(tmp_path)), between.inside, between.across, 1, step_s=0.0)
    assert latency.prefill_s(0, 1 << 20, group) < other.prefill_s(0, 1 << 20, group)


EIGHT = (InstancePool(count=8), InstancePool(role="decode"))


def info_of(tp: int = 1) -> EngineInfo:
    """An instance that takes 10 us a row, and 1 ns for each pair of a token and a cached one."""
    return msgspec.structs.replace(INFO, latency=describe(TABLE), layout=f"tp{tp}-pp1-kvp1")


def a_cluster(tmp_path: Path, **fields: Any) -> ClusterRules:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return rules_of(ClusterFile(pools=EIGHT, **fields), str(tmp_path), [info_of()] * 9)


def test_a_ring_step_costs_no_constant_of_another_machine(tmp_path: Path) -> None:
    """32 layers of two steps, each of which takes 0.1 ms to send; Tetris's A100 takes 0.75 ms."""
    spans = a_cluster(tmp_path, placement="tetris").latency
    assert spans.prefill_s(0, 2, GroupShape(2, strategy=Strategy("striped"))) < 32 * 2 * 7.5e-4 / 4


def test_measured_times_of_groups_are_used_and_a_replay_has_them(tmp_path: Path) -> None:
    fit = tmp_path / "fit.json"
    sizes = {1: eq1.Eq1Coefficients(0.1, 1e-3, 0.0, 0.0), 2: eq1.Eq1Coefficients(0.2, 5e-4, 0.0, 0.0)}
    fit.write_bytes(msgspec.json.encode(eq1.Eq1File(source="here", sizes=sizes)))
    read = cluster_file({"pools": [{"count": 8}], "placement": "tetris", "group_times": str(fit)}, "file")
    assert read.group_times == str(fit)
    rules = a_cluster(tmp_path, placement="tetris", group_times=str(fit))
    assert rules.latency.prefill_s(0, 1000, GroupShape(2)) == pytest.approx(0.7)
    derived = a_cluster(tmp_path, placement="tetris").latency
    whole = GroupShape(8, strategy=Strategy("striped"))
    assert rules.latency.prefill_s(0, 64_000, whole) == pytest.approx(derived.prefill_s(0, 64_000, whole), rel=0.01)
    about = msgspec.json.decode(msgspec.json.encode(rules_of(read, str(tmp_path), [info_of()] * 8).about))
    fit.unlink()
    again = policy_context(read, str(tmp_path), about).latency
    assert again.prefill_s(0, 1000, GroupShape(2)) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"placement": "pecsched"}, "pecsched chooses by their cost"),
        ({"placement": "jsq", "pools": [{"backend": "vllm", "urls": ["http://x:1"]}]}, "serve whole requests"),
        ({"placement": "tetris"}, "cannot read nowhere"),
    ],
)
def test_measured_times_that_cannot_be_used_are_refused(fields: dict[str, Any], words: str) -> None:
    data = {"pools": [{"count": 3}, {"role": "decode"}], "group_times": "nowhere", **fields}
    with pytest.raises(ConfigError, match=words):
        cluster_file(data, "file")


def test_a_live_cluster_chooses_the_form_of_sequence_parallelism_by_its_cost(tmp_path: Path) -> None:
    """A zigzag ring has no instance that all wait for. Ulysses is no choice where a ring would take its place."""

    def chosen(tokens: int, replicas: int, tp: int = 1, **config: int) -> Strategy:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
        about = {"latency": info_of(tp).latency, "layout": info_of(tp).layout}
        context = policy_context(ClusterFile(pools=EIGHT, placement="pecsched"), str(tmp_path), about)
        seconds = context.latency.prefill_s
        groups = {a: GroupShape(replicas, strategy=Strategy(a)) for a in ("ring", "ulysses", "striped")}
        assert seconds(0, tokens, groups["ring"]) == seconds(0, tokens, groups["striped"])
        choice = StrategyChooser(context, tp, True).choose(tokens, replicas, 1)
        if tp == 1 and context.exchanges_heads(1, replicas):
            costs = {a: seconds(0, -(-tokens // 1024) * 1024, groups[a]) for a in ("ring", "ulysses")}
            assert choice.strategy.attn == min(costs, key=costs.__getitem__)
        return choice.strategy

    assert chosen(100_000, 8, num_attention_heads=30, num_key_value_heads=10) == Strategy("ring")
    assert {chosen(tokens, 8).attn for tokens in (2_000, 500_000)} <= {"ring", "ulysses"}
    assert chosen(100_000, 4, tp=2).attn == "megatron"


@pytest.mark.parametrize(
    ("placement", "options", "words"),
    [
        ("fifo", {}, "fifo decodes where it prefills"),
        ("priority", {}, "priority decodes"),
        ("reservation", {}, "reservation decodes"),
        ("pecsched", {"disaggregate": False}, "pecsched with `disaggregate: false` decodes"),
        ("pecsched", {}, None),
        ("tetris", {}, None),
        ("fixed-sp", {}, None),
        ("loongserve", {}, None),
    ],
)
def test_a_decode_pool_that_a_policy_never_uses_gets_a_warning(
    placement: str, options: dict[str, Any], words: str | None
) -> None:
    said = ClusterFile(pools=APART, placement=placement, options=options).combination.idle_pools()
    assert len(said) == (words is not None)
    assert words is None or said[0].startswith(f"pools[1] is of role decode and does nothing: {words}")
    two = ClusterFile(pools=(InstancePool(), InstancePool()), placement=placement, options=options)
    assert two.combination.idle_pools() == []


def test_unused_and_small_pools_are_logged_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    fast = table([(1, 1e-6), (64, 6e-5)], [(0, 0.0, 0.0), (64, 0.0, 1e-12)], (0.0, 0.0, 0.0))
    info = msgspec.structs.replace(MOVES, latency=describe(fast), layout="tp1-pp1-kvp1")
    small = msgspec.structs.replace(info, context_tokens=16_384, kv_tokens_total=6000)
    large = msgspec.structs.replace(info, context_tokens=16_384, kv_tokens_total=7000)
    file = ClusterFile(pools=(InstancePool(role="prefill", count=2), InstancePool(role="decode")), placement="fifo")
    live_rules(file, str(tmp_path), [large, large, small], None)
    idle, short = (each.message for each in caplog.records)
    assert idle == "pools[1] is of role decode and does nothing: fifo decodes where it prefills"
    assert short.startswith("requests of up to 13,872 tokens are served, output included, not of the model's 16,384")
    assert short.endswith("an instance's KV pool holds pools[0] 7,000, pools[1] 6,000")
    caplog.clear()
    large = msgspec.structs.replace(info, context_tokens=16_384, kv_tokens_total=16_384)
    live_rules(ClusterFile(pools=(InstancePool(count=3),)), str(tmp_path), [large, large, large], None)
    assert not caplog.records


def test_groups_decode_in_place_under_the_policies_whose_papers_have_it_so() -> None:
    def in_place(placement: str, **fields: Any) -> bool:
        return ClusterFile(pools=APART, placement=placement, **fields).in_place

    assert [name for name in names() if in_place(name)] == ["loongserve", "pecsched"]
    assert in_place("fifo", group_decode="in-place")
    assert not in_place("pecsched", group_decode="gather")


@pytest.mark.parametrize("name", ["tp2", "tp0-pp1-kvp1", "tp1-pp1-kvp1 "])
def test_a_malformed_layout_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        ParallelLayout.named(name)
