"""A restarted engine asks for the bytes of the first one's KV pool, and gets as many blocks, whatever is free."""

from __future__ import annotations

import pytest
import torch

from headway.core.files import read_json
from headway.perf.hardware import ParallelLayout
from headway.runtime import embedded
from headway.runtime.assembly import single_process as one_process
from headway.runtime.assembly.engine import kv_blocks
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.engine.config import EngineConfig
from headway.runtime.executor.plans import places
from headway.runtime.executor.profiling import need
from headway.runtime.model.config import read_config


@pytest.mark.parametrize("block_size", [1, 48, 64])
def test_the_pool_keeps_its_size_in_one_process(monkeypatch: pytest.MonkeyPatch, block_size: int) -> None:
    model = str(embedded.model_path())
    built = []
    for free, asked in ((40_000_001, None), (1_000_000, None), (1_000_000, "as before")):
        monkeypatch.setattr(one_process, "available_bytes", lambda free=free: free)
        pinned = built[0].kv_bytes if asked else None
        built.append(one_process.build_one(EngineConfig(model=model, block_size=block_size, kv_cache_bytes=pinned)))
    first, smaller, again = built
    assert smaller.kv_tokens < first.kv_tokens == again.kv_tokens
    assert first.kv_bytes == again.kv_bytes


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 3, 1), (4, 2, 1), (2, 1, 2), (1, 2, 3)])
@pytest.mark.parametrize("free", [50_000_017, 3_000_000_001])
def test_the_pool_keeps_its_size_over_several_workers(degrees: tuple[int, int, int], free: int) -> None:
    layout = ParallelLayout(tp=degrees[0], stages=degrees[1], kvp=degrees[2])
    path = embedded.model_path() / "config.json"
    shape = read_config(read_json(path), None, str(path))
    per_token = need(shape, layout, 4).kv_per_token
    config = EngineConfig(model="m", block_size=48)
    blocks = kv_blocks(config, shape, per_token, free, layout.kvp)
    held = 0
    for shard in (place.shard for place in places(layout)):
        layers, heads = len(shard.layers(shape)), len(shard.kv_heads(shape))
        held += blocks * 48 * KvPool.bytes_per_token(layers, heads, shape.head_dim, torch.float32)
    again = EngineConfig(model="m", block_size=48, kv_cache_bytes=held)
    assert kv_blocks(again, shape, per_token, 1, layout.kvp) == blocks


@pytest.mark.parametrize("groups", [1, 2])
def test_the_longest_request_is_described_by_numbers(groups: int, caplog: pytest.LogCaptureFixture) -> None:
    """Groups share a request: together they hold it."""
    path = embedded.model_path() / "config.json"
    shape = read_config(read_json(path), None, str(path))
    config = EngineConfig(model=str(embedded.model_path()), kv_cache_bytes=2 << 20)
    blocks = kv_blocks(config, shape, 1024, 0, groups)
    assert groups * blocks * config.block_size == 2048
    whole = shape.max_model_len
    assert whole == 1 << 20
    assert (
        f"room for 2048 tokens (2.0 MiB): the longest prompt with its output is that, not the model's {whole}"
        in caplog.text
    )
    assert "would take 1.0 GiB" in caplog.text
