"""The model over several worker processes of this host. The engine's own process needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from headway.cli.assemble import Built, eos_ids, kv_blocks
from headway.core.errors import CheckpointError
from headway.engine.config import EngineConfig
from headway.hardware.memory import available_bytes
from headway.latency.layout import Layout
from headway.model.config import read_config
from headway.model.fields import read_json
from headway.parallel.executor import ParallelExecutor
from headway.parallel.fit import check_memory, check_shape, need
from headway.parallel.rank_config import RankConfig
from headway.worker.processes import ProcessWire

_ITEMSIZE = {"float32": 4, "bfloat16": 2}


def build_many(config: EngineConfig, layout: Layout) -> Built:
    """Check that the layout can be, start the ranks, and wait until all have loaded. Raises ConfigError otherwise, with
    the layouts that would fit or with the words of the rank that could not start."""
    folder = Path(config.model)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such model folder")
    path = folder / "config.json"
    shape = read_config(read_json(path), config.max_model_len, str(path))
    itemsize = _ITEMSIZE[shape.dtype_for(config.dtype)]
    available = available_bytes()
    longest = config.max_model_len or min(shape.max_model_len, 2 * config.block_size)
    check_shape(shape, layout)
    check_memory(shape, layout, itemsize, available, config.kv_cache_bytes, longest)
    wanted = need(shape, layout, itemsize)
    left = max(0, available - wanted.weights - wanted.processes)
    blocks = kv_blocks(config, shape, wanted.kv_per_token * layout.kvp, left)
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // layout.accelerators)
    backend = "cpu" if config.attention_backend == "auto" else config.attention_backend
    wire = ProcessWire(
        RankConfig(
            model=config.model,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            attention_backend=backend,
            threads=threads,
            kv_blocks=blocks,
            block_tokens=config.block_size,
            eos=eos_ids(folder),
            tp=layout.tp,
            stages=layout.stages,
            kvp=layout.kvp,
        )
    )
    ready = wire.start()
    executor = ParallelExecutor(wire, layout, blocks)
    weights = sum(rank.weights_bytes for rank in ready)
    return Built(
        executor=executor,
        measure=executor.measure,
        shape=shape,
        dtype=ready[0].dtype,
        mark=ready[0].mark,
        threads=threads,
        kv_tokens=blocks * config.block_size,
        kv_bytes=sum(rank.kv_bytes for rank in ready),
        parameters=weights // itemsize // layout.kvp,
        weights_bytes=weights,
    )
