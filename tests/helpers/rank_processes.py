"""Ranks as real processes under one executor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headway.runtime.executor.multi_process import MultiProcessExecutor, ProcessTransport
from headway.runtime.executor.plans import RankConfig

KV_BLOCKS = 64


BLOCK_TOKENS = 8


def make_rank_config(folder: Path, tp: int, stages: int, **changes: Any) -> RankConfig:
    config = RankConfig(
        model=str(folder), dtype="auto", max_model_len=None, attention_backend="cpu", threads=1, kv_blocks=KV_BLOCKS,
        block_tokens=BLOCK_TOKENS, eos=(), tp=tp, stages=stages, kvp=1, patience_s=60.0,
    )  # fmt: skip
    return msgspec.structs.replace(config, **changes)


@contextmanager
def rank_executor(config: RankConfig) -> Iterator[tuple[MultiProcessExecutor, ProcessTransport]]:
    wire = ProcessTransport(config)
    wire.start()
    executor = MultiProcessExecutor(wire, config.layout, config.kv_blocks)
    try:
        yield executor, wire
    finally:
        executor.close()
        assert all(not process.is_alive() for process in wire.processes)
        assert not Path(wire._directory).exists()
