"""What a cluster is told when instances that have started cannot do what its policy asks of them."""

from __future__ import annotations

import pytest

from headway.cli.cluster_rules import check_moves
from headway.core.errors import ConfigError
from headway.engine.protocol import EngineInfo
from headway.router.cluster_file import ClusterFile, Pool

APART = (Pool(role="prefill"), Pool(role="decode"))
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
        (ClusterFile(pools=(Pool(),), placement="tetris"), False),
        (ClusterFile(pools=(Pool(),), placement="fifo", options={"long_sp": 1}), True),
        (ClusterFile(pools=(Pool(),)), True),
    ],
)
def test_an_instance_whose_kv_does_not_move_serves_whole_requests_only(file: ClusterFile, whole: bool) -> None:
    check_moves(file, [MOVES, MOVES])
    if whole:
        check_moves(file, [MOVES, INFO])
        return
    with pytest.raises(ConfigError, match="instance 1 computes on cuda: KV moves between pools in host memory only"):
        check_moves(file, [MOVES, INFO])
