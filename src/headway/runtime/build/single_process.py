"""Loading the model in the engine's own process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from headway.perf.hardware.device import choose
from headway.perf.hardware.memory import available_bytes
from headway.runtime.attention.base import kernels_of, make_backend
from headway.runtime.attention.native import build_fp32_library, build_library
from headway.runtime.build.checkpoint_facts import eos_ids
from headway.runtime.build.engine import LoadedModel, backend_name, kv_blocks
from headway.runtime.engine.config import EngineConfig
from headway.runtime.executor.cuda_probe import look
from headway.runtime.executor.measure import measure
from headway.runtime.executor.pool_copier import PoolCopier
from headway.runtime.executor.single_process import SingleProcessExecutor
from headway.runtime.executor.thread_pinning import ThreadPinning
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.model.loading import load_decoder
from headway.sim.report.progress import StepBar


def build_one(config: EngineConfig) -> LoadedModel:
    """Load the model and make its KV pool. Raises ConfigError when it does not fit."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    team = ThreadPinning(torch.get_num_threads())
    devices = choose(config.device, 1, look)
    name = backend_name(config, devices)
    # Instances of a cluster start side by side: their bars would overwrite each other.
    alone = config.instance is None
    if name == "cpu":
        with StepBar("compiling kernels for this processor, once: steps", shown=alone) as compiling:
            # The checkpoint's type is read with the weights, so both are built.
            for build in (build_library, build_fp32_library):
                build(compiling)
    backend = make_backend(name)
    device = "cpu" if devices is None else f"cuda:{devices.first}"
    if devices is not None:
        torch.cuda.set_device(device)
    with StepBar("loading weights, layers", shown=alone) as loading:
        decoder = load_decoder(config.model, config.dtype, config.max_model_len, device, backend, loaded=loading)
    # Measured after loading: the weights are no longer part of what is free.
    free = available_bytes() if devices is None else torch.cuda.mem_get_info(device)[0]
    # A pool of one slot has the size of one token.
    blocks = kv_blocks(config, decoder.config, decoder.make_pool(1).nbytes, free)
    worker = ModelWorker(decoder, blocks, config.block_size, eos_ids(Path(config.model)))
    parameters = decoder.weights.parameters
    return LoadedModel(
        executor=SingleProcessExecutor(worker, team),
        measure=partial(measure, worker),
        shape=decoder.config,
        dtype=str(decoder.dtype).removeprefix("torch."),
        mark=decoder.fingerprint,
        threads=torch.get_num_threads(),
        kv_tokens=worker.pool.slots,
        kv_bytes=worker.pool.nbytes,
        parameters=parameters,
        weights_bytes=parameters * decoder.dtype.itemsize,
        device=decoder.device.type,
        processor=None if devices is None else devices.name,
        kernels=kernels_of(backend, decoder.dtype),
        copier=PoolCopier(worker.pool, config.block_size),
    )
