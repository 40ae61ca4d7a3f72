"""The model in the engine's own process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from headway.attention.base import make_backend
from headway.cli.assemble import Built, eos_ids, kv_blocks
from headway.engine.config import EngineConfig
from headway.hardware.memory import available_bytes
from headway.model.loading import load_decoder
from headway.worker.local import LocalExecutor
from headway.worker.measure import measure
from headway.worker.worker import Worker


def build_one(config: EngineConfig) -> Built:
    """Load, and make the pool. Raises ConfigError when it cannot be."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    backend = make_backend("cpu" if config.attention_backend == "auto" else config.attention_backend)
    decoder = load_decoder(config.model, config.dtype, config.max_model_len, "cpu", backend)
    blocks = kv_blocks(config, decoder.config, decoder.make_pool(1).nbytes, available_bytes())
    worker = Worker(decoder, blocks, config.block_size, eos_ids(Path(config.model)))
    parameters = decoder.weights.parameters
    return Built(
        executor=LocalExecutor(worker),
        measure=partial(measure, worker),
        shape=decoder.config,
        dtype=str(decoder.dtype).removeprefix("torch."),
        mark=decoder.fingerprint,
        threads=torch.get_num_threads(),
        kv_tokens=worker.pool.slots,
        kv_bytes=worker.pool.nbytes,
        parameters=parameters,
        weights_bytes=parameters * decoder.dtype.itemsize,
    )
