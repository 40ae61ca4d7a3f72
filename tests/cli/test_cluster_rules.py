"""Errors and warnings for started instances that cannot do what the cluster's policy needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.core.errors import ConfigError
from headway.core.span import Strategy
from headway.perf.latency.groups import GroupShape
from headway.perf.latency.layout import ParallelLayout
from headway.perf.latency.recorded import describe
from headway.perf.latency.ring import RingLatency
from headway.perf.latency.table_latency import TableLatency, TableSource
from headway.runtime.build.cluster_rules import check_moves, links, live_rules, rules_of, shape_of
from headway.runtime.cluster.cluster_file import ClusterFile, InstancePool, idle_pools
from headway.runtime.engine.protocol import EngineInfo

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}  # fmt: skip

APART = (InstancePool(role="prefill"), InstancePool(role="decode"))
INFO = EngineInfo(
    model="m", architecture="a", dtype="float32", device="cuda", max_model_len=512, vocab_size=128, kv_tokens_total=512,
    kv_block_tokens=8, policy="lars", chunking="adaptive", mode="default", t_target_s=0.02, max_num_seqs=64,
    max_queued_requests=8, parameters=1, weights_bytes=4, kv_bytes=4,
)  # fmt: skip
MOVES = EngineInfo(**{name: getattr(INFO, name) for name in INFO.__struct_fields__} | {"peer_address": "unix:p"})


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
        TableLatency(TableSource(fingerprint="", provenance="", tokens=((1, row_s), (64, 64 * row_s)),
                                 chunks=((0, 0.0, 0.0), (64, 0.0, 1e-12)), decode=(0.0, 0.0, 0.0)))
        for row_s in (1e-6, 2e-6, 3e-6, 4e-6)
    ]  # fmt: skip
    infos = [
        msgspec.structs.replace(INFO, latency=describe(table), layout=f"tp{2**i}-pp1-kvp1")
        for i, table in enumerate(tables)
    ]
    latency = rules_of(file, str(tmp_path), infos).latency
    between = links(file)
    wanted = RingLatency(tables[2], shape_of(str(tmp_path)), between.inside, between.across, 4)
    for group in (GroupShape(1), GroupShape(2, strategy=Strategy("ring"))):
        assert latency.prefill_s(0, 1 << 20, group) == wanted.prefill_s(0, 1 << 20, group)
    other = RingLatency(tables[2], shape_of(str(tmp_path)), between.inside, between.across, 1)
    assert latency.prefill_s(0, 1 << 20, group) < other.prefill_s(0, 1 << 20, group)


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
    said = idle_pools(ClusterFile(pools=APART, placement=placement, options=options))
    assert len(said) == (words is not None)
    assert words is None or said[0].startswith(f"pools[1] is of role decode and does nothing: {words}")
    assert idle_pools(ClusterFile(pools=(InstancePool(), InstancePool()), placement=placement, options=options)) == []


def test_unused_and_unequal_pools_are_logged_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    table = TableLatency(TableSource(fingerprint="", provenance="", tokens=((1, 1e-6), (64, 6e-5)),
                                     chunks=((0, 0.0, 0.0), (64, 0.0, 1e-12)), decode=(0.0, 0.0, 0.0)))  # fmt: skip
    info = msgspec.structs.replace(MOVES, latency=describe(table), layout="tp1-pp1-kvp1")
    small = msgspec.structs.replace(info, max_model_len=6000)
    large = msgspec.structs.replace(info, max_model_len=16_384)
    file = ClusterFile(pools=(InstancePool(role="prefill", count=2), InstancePool(role="decode")), placement="fifo")
    live_rules(file, str(tmp_path), [large, large, small], None)
    assert [each.message for each in caplog.records] == [
        "pools[1] is of role decode and does nothing: fifo decodes where it prefills",
        "requests of up to 6,000 tokens are served, output included: the longest are pools[0] 16,384, pools[1] 6,000",
    ]
    caplog.clear()
    live_rules(ClusterFile(pools=(InstancePool(count=3),)), str(tmp_path), [large, large, large], None)
    assert not caplog.records


@pytest.mark.parametrize("name", ["tp2", "tp0-pp1-kvp1", "tp1-pp1-kvp1 "])
def test_a_malformed_layout_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        ParallelLayout.named(name)
