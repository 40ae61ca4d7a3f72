"""The model in the engine's own process: how it is loaded, and its executor."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headway.core.batch import Batch, KvOp, StepResult
from headway.core.machine import CORES
from headway.core.request import SamplingParams
from headway.perf.device import DeviceAssignment, available_bytes, choose, processor_name
from headway.perf.hardware import ParallelLayout
from headway.perf.latency import table
from headway.runtime.assembly.engine import LoadedModel, backend_name, kv_blocks, named_profile
from headway.runtime.assembly.facts import eos_ids
from headway.runtime.attention.backend import AttentionBackend
from headway.runtime.attention.backends import kernels_of, make_backend
from headway.runtime.attention.native import build_general_library, build_library
from headway.runtime.engine.config import EngineConfig
from headway.runtime.executor.measure import ComputeThreads, compute, measure
from headway.runtime.executor.profiling import look
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.model.decoder import DecoderModel
from headway.runtime.model.loading import load_decoder
from headway.sim.report.tables import StepBar


class SingleProcessExecutor:
    """`Executor` over one `ModelWorker`. `submit` blocks for the iteration; `result` never does."""

    waits_on: tuple[Any, ...] = ()
    accepts = True
    free = None

    def __init__(self, worker: ModelWorker, team: ComputeThreads | None = None) -> None:
        self.worker, self._team = worker, team
        self._done: deque[StepResult] = deque()

    def admit(
        self,
        request_id: str,
        prompt: memoryview,
        params: SamplingParams,
        output: tuple[int, ...] = (),
        kept: bool = False,
    ) -> None:
        self.worker.admit(request_id, prompt.nbytes // 4, prompt, params, output)

    def submit(self, batch: Batch) -> None:
        started = ended = time.monotonic()
        part = batch.parts[0]
        if self._team is not None:
            self._team.begin(started, self.worker.work_rows(part))
        try:
            self.worker.replay(part.kv_ops)
            emitted = self.worker.run(part)
        finally:
            ended = time.monotonic()
            if self._team is not None:
                self._team.end(ended)
        self._done.append(StepResult(batch.id, emitted, ended - started, (((started, ended),),)))

    def replay(self, ops: tuple[KvOp, ...]) -> None:
        """Carry out KV operations without a batch, ahead of the next batch."""
        self.worker.replay(ops)

    def result(self, timeout_s: float | None) -> StepResult | None:
        return self._done.popleft() if self._done else None

    def recover(self) -> None:
        """Never called: this executor has no workers to lose apart from the engine's process."""

    def forget(self, request_id: str) -> None:
        self.worker.forget(request_id)

    def close(self) -> None:
        """Nothing to close: memory is released with the process."""


@dataclass(frozen=True)
class LoadedDecoder:
    """A model without KV pool, as a template's engines share it."""

    decoder: DecoderModel
    backend: AttentionBackend
    devices: DeviceAssignment | None


def load(config: EngineConfig) -> LoadedDecoder:
    """Load the model and the kernels that it needs. Raises ConfigError."""
    devices = choose(config.device, 1, look)
    name = backend_name(config, devices)
    # Instances of a cluster start side by side: their bars would overwrite each other.
    alone = config.instance is None
    if name == "cpu":
        with StepBar("compiling kernels for this processor, once: steps", shown=alone) as compiling:
            # The checkpoint's type is read with the weights, so both are built.
            for build in (build_library, build_general_library):
                build(compiling)
    backend = make_backend(name)
    device = "cpu" if devices is None else f"cuda:{devices.first}"
    if devices is not None:
        torch.cuda.set_device(device)
    with StepBar("loading weights, layers", shown=alone) as loading:
        decoder = load_decoder(config.model, config.dtype, config.max_model_len, device, backend, loaded=loading)
    return LoadedDecoder(decoder, backend, devices)


def build_one(config: EngineConfig, loaded: LoadedDecoder | None = None) -> LoadedModel:
    """Load the model, unless it is `loaded`, and make its KV pool. Raises ConfigError when it does not fit."""
    named = named_profile(config)
    profiled = None if named is None else table.threads_of(named)
    threads = config.threads or (profiled if profiled is not None and profiled <= len(CORES) else None)
    if threads is not None:
        torch.set_num_threads(threads)
    team = ComputeThreads(torch.get_num_threads(), config.threads is not None)
    loaded = load(config) if loaded is None else loaded
    decoder, backend, devices = loaded.decoder, loaded.backend, loaded.devices
    # Measured after loading: the weights are no longer part of what is free.
    free = available_bytes() if devices is None else torch.cuda.mem_get_info(decoder.device)[0]
    # A pool of one slot has the size of one token.
    blocks = kv_blocks(config, decoder.config, decoder.make_pool(1).nbytes, free)
    worker = ModelWorker(decoder, blocks, config.block_size, eos_ids(Path(config.model)))
    dtype = str(decoder.dtype).removeprefix("torch.")
    if devices is None:
        if config.latency_profile == "auto":
            profiled = _threads_of_kept_profile(decoder.fingerprint, dtype, team.most)
        if profiled == 1 and config.threads is None:
            team.most = 1
        team.choose(partial(compute, worker), keep=profiled is not None)
    parameters = decoder.weights.parameters
    return LoadedModel(
        executor=SingleProcessExecutor(worker, team),
        measure=partial(_measure, worker, team),
        shape=decoder.config,
        dtype=dtype,
        mark=decoder.fingerprint,
        threads=team.most,
        thread_choice=team.described() if devices is None else "",
        kv_tokens=worker.pool.slots,
        kv_bytes=worker.pool.nbytes,
        parameters=parameters,
        weights_bytes=parameters * decoder.dtype.itemsize,
        device=decoder.device.type,
        processor=None if devices is None else devices.name,
        kernels=kernels_of(backend, decoder.dtype),
    )


def _threads_of_kept_profile(mark: str, dtype: str, most: int) -> int | None:
    """Return with how many threads this model was profiled here: the choice at each start must not lose a profile."""
    name, layout = processor_name(), ParallelLayout().name
    kept = (n for n in (most, 1) if table.default_path(table.fingerprint(mark, dtype, name, n, layout)).exists())
    return next(kept, None)


def _measure(worker: ModelWorker, team: ComputeThreads, kind: str, first: int, second: int, repeats: int) -> float:
    """`measure`, by as many threads as an iteration of that size, or of a much deeper history."""
    # Times of chunks are extrapolated from the measured histories, and over deep ones all threads compute.
    rows = math.inf if kind == "chunk" and second else worker.rows_of(first, first * second if kind == "decodes" else 0)
    team.begin(time.monotonic(), rows)
    try:
        return measure(worker, kind, first, second, repeats)
    finally:
        team.end(time.monotonic())
