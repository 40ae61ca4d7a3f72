"""The composition root of an engine: settings in, a ready `EngineCore` out. Imports torch."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import torch

from headway import embedded
from headway.attention.base import make_backend
from headway.core.clock import Clock
from headway.core.errors import ConfigError
from headway.engine.config import EngineConfig
from headway.engine.core import EngineCore, Log
from headway.engine.protocol import EngineInfo
from headway.hardware.memory import available_bytes, gib
from headway.hardware.processor import processor_name
from headway.kv.ledger import Ledger
from headway.latency import store
from headway.latency.base import LatencyModel
from headway.latency.corrected import CorrectedLatency
from headway.latency.tables import TableLatency
from headway.model.decoder import Decoder
from headway.model.loading import load_decoder
from headway.scheduling.config import SchedulerConfig
from headway.scheduling.scheduler import Scheduler
from headway.worker import profiling
from headway.worker.local import LocalExecutor
from headway.worker.worker import Worker

log = logging.getLogger("headway.engine")


def build_worker(config: EngineConfig) -> Worker:
    """Load the model and make its KV pool, sized to the machine. Raises ConfigError when it cannot fit."""
    if config.device not in ("auto", "cpu"):
        raise ConfigError(f"device {config.device!r} is not supported yet: this version computes on cpu")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    backend = make_backend("cpu" if config.attention_backend == "auto" else config.attention_backend)
    decoder = load_decoder(config.model, config.dtype, config.max_model_len, "cpu", backend)
    blocks = _kv_blocks(config, decoder)
    return Worker(decoder, blocks, config.block_size, eos_ids(Path(config.model)))


def assemble(config: EngineConfig, clock: Clock) -> EngineCore:
    """Everything that an engine process runs. Takes as long as loading the model, plus about 0.3 s of measuring when
    no profile of this model on this machine is found."""
    schedule = SchedulerConfig.named(config.mode, **config.scheduler)
    worker = build_worker(config)
    decoder = worker.decoder
    ledger = Ledger(worker.pool.slots, config.block_size)
    latency = latency_model(config, worker)
    scheduler = Scheduler(schedule, latency, ledger)
    max_model_len = min(decoder.config.max_model_len, ledger.total_tokens)
    parameters = decoder.weights.parameters
    info = EngineInfo(
        model=model_name(config.model),
        architecture=decoder.config.architecture,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device="cpu",
        max_model_len=max_model_len,
        vocab_size=decoder.config.vocab_size,
        kv_tokens_total=ledger.total_tokens,
        kv_block_tokens=config.block_size,
        policy=scheduler.policy.name,
        chunking=scheduler.chunking.name,
        mode=schedule.mode,
        t_target_s=schedule.t_target_s,
        max_num_seqs=schedule.max_num_seqs,
        max_queued_requests=config.max_queued_requests,
        parameters=parameters,
        weights_bytes=parameters * decoder.dtype.itemsize,
        kv_bytes=worker.pool.nbytes,
        eos_token_ids=eos_ids(Path(config.model)),
    )
    return EngineCore(scheduler, LocalExecutor(worker), clock, info, event_log(config.event_log))


def latency_model(config: EngineConfig, worker: Worker) -> LatencyModel:
    """The cached profile of this model on this machine; without one, a quick measurement, corrected as it runs."""
    mark = profile_mark(worker)
    if config.latency_profile not in ("auto", "quick"):
        return CorrectedLatency(TableLatency(store.load(Path(config.latency_profile), mark)), confidence=20.0)
    path = store.default_path(mark)
    if config.latency_profile == "auto" and path.exists():
        try:
            return CorrectedLatency(TableLatency(store.load(path, mark)), confidence=20.0)
        except ConfigError as error:
            log.warning("%s; measuring anew", error)
    quick = profiling.profile(worker, profiling.QUICK, 0.3, mark, "quick measurement at start-up")
    return CorrectedLatency(TableLatency(quick), confidence=2.0)


def profile_mark(worker: Worker) -> str:
    """What a profile of this worker holds for."""
    decoder = worker.decoder
    dtype = str(decoder.dtype).removeprefix("torch.")
    return store.fingerprint(decoder.fingerprint, dtype, processor_name(), torch.get_num_threads())


def eos_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end an answer: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        try:
            data: dict[str, Any] = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        value = data.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list):
            return tuple(int(v) for v in value)
    return ()


def model_name(folder: str) -> str:
    """What a model is called where nobody named it: its folder's last part."""
    path = Path(folder).resolve()
    return "headway-embedded" if path == embedded.model_path().resolve() else path.name


def event_log(path: str | None) -> Log | None:
    """A JSON-lines file of everything that the scheduler saw, for replay; None when not asked for."""
    if path is None:
        return None
    file = Path(path).open("wb", buffering=1 << 20)  # noqa: SIM115 - open for the process's life
    encoder = msgspec.json.Encoder()

    def write(kind: str, fields: dict[str, object]) -> None:
        file.write(encoder.encode({"event": kind, **fields}) + b"\n")
        if kind not in ("batch", "schedule"):
            file.flush()

    return write


def _kv_blocks(config: EngineConfig, decoder: Decoder) -> int:
    shape = decoder.config
    per_token = decoder.make_pool(1).nbytes
    asked = config.max_model_len
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    else:
        budget = int(0.5 * available_bytes())
        budget = min(budget, per_token * (2 * shape.max_model_len + 262_144))
    blocks = budget // (per_token * config.block_size)
    tokens = blocks * config.block_size
    need = asked if asked is not None else min(shape.max_model_len, 2 * config.block_size)
    if tokens < need:
        raise ConfigError(
            f"the KV cache has room for {max(tokens, 0)} tokens ({gib(budget)} at {per_token} bytes a token) and "
            f"{'--max-model-len' if asked else 'the smallest useful pool'} needs {need}: give it more memory with "
            f"--kv-cache-memory (at least {gib(need * per_token)}) or lower --max-model-len"
        )
    if asked is None and tokens < shape.max_model_len:
        log.warning("the KV cache holds %d tokens, so prompts are limited to that, not %d", tokens, shape.max_model_len)
    return blocks
