"""Ranks as real processes under one executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headway.runtime.engine.config import EngineConfig
from headway.runtime.executor.multi_process import MultiProcessExecutor, ProcessTransport
from headway.runtime.executor.plans import RankConfig

KV_BLOCKS = 64


BLOCK_TOKENS = 8


def make_rank_config(
    folder: Path,
    tp: int,
    stages: int,
    kvp: int = 1,
    nodes: int = 1,
    attention_backend: str = "cpu",
    kv_blocks: int = KV_BLOCKS,
    **fields: Any,
) -> RankConfig:
    engine = EngineConfig(
        model=str(folder), attention_backend=attention_backend, threads=1, block_size=BLOCK_TOKENS,
        tensor_parallel_size=tp, pipeline_parallel_size=stages, kv_parallel_size=kvp, nnodes=nodes, ray_address="auto",
    )  # fmt: skip
    return RankConfig(engine=engine, kv_blocks=kv_blocks, **{"patience_s": 60.0, **fields})


@contextmanager
def rank_executor(config: RankConfig) -> Iterator[tuple[MultiProcessExecutor, ProcessTransport]]:
    wire = ProcessTransport(config)
    wire.start()
    executor = MultiProcessExecutor(wire, config.engine.layout)
    try:
        yield executor, wire
    finally:
        executor.close()
        assert all(process.ended for process in wire.processes)
        assert not Path(wire._directory).exists()
