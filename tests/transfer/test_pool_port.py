"""What leaves a worker's pool while its engine goes on: chunks of a prompt whose blocks others get meanwhile."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.helpers.engine_fixtures import INFO
from tests.helpers.present import present
from tests.helpers.random_weights import random_decoder, reference_config
from tests.helpers.unit_latency import small_machine
from tests.transfer.kv_ends import End, meet

from headway.core.errors import ConfigError
from headway.core.request import Phase, SamplingParams
from headway.kv.block_manager import BlockManager
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.scheduler import Scheduler
from headway.runtime.assembly.engine_process import WallClock
from headway.runtime.assembly.single_process import SingleProcessExecutor
from headway.runtime.cluster.agent import KvConnectorScheduler
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import FromInstance, ReserveKv, SendKv, SpanTaskLost, SubmitRequest
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.kv_transfer.peers import PeerStream
from headway.runtime.kv_transfer.port import KvPort
from headway.runtime.sequence_parallel.spans import SpanExecutor

BLOCKS, BLOCK = 12, 16


class Engine:
    """An engine in this process, whose connector is that of an `End`."""

    def __init__(self, end: End) -> None:
        torch.manual_seed(0)
        shape = dataclasses.replace(reference_config(512), layers=2, max_model_len=512)
        worker = ModelWorker(random_decoder(shape, torch.float32), BLOCKS, BLOCK, ())
        executor = SingleProcessExecutor(worker)
        config = SchedulerConfig.named(
            "default", policy="fcfs", max_num_batched_tokens=5,
            chunking="static:5",
        )  # fmt: skip
        info = msgspec.structs.replace(
            INFO, vocab_size=shape.vocab_size, kv_tokens_total=BLOCKS * BLOCK, kv_block_tokens=BLOCK, eos_token_ids=()
        )
        clock = WallClock()
        self.pool = worker.pool
        self.core = EngineCore(
            Scheduler(config, small_machine(), BlockManager(BLOCKS * BLOCK, BLOCK)), executor, clock, info
        )
        runs = SpanExecutor(worker, end.peers, ())
        self.desk = KvConnectorScheduler(
            self.core, KvPort(worker, BLOCK, runs, end.connector, end.number), executor.replay, clock
        )
        self.words: list[FromInstance] = []

    def submit(self, name: str, tokens: int, most: int, phase: Phase) -> None:
        prompt = np.random.default_rng(len(name)).integers(5, 1000, tokens, dtype=np.int32)
        message = SubmitRequest(
            id=name, prompt_tokens=tokens, params=SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True),
            received_s=0.0, phase=phase,
        )  # fmt: skip
        assert self.core.submit(message, memoryview(prompt.tobytes())) is None

    def step(self) -> None:
        staged_kv = present(self.core.scheduler.staged_kv)
        for name in staged_kv.admit():
            self.desk.granted(name)
        self.core.step()
        self.words += self.desk.turn()
        self.core.scheduler.check()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[End, End]]:
    both = End(0, tmp_path), End(1, tmp_path)
    meet(*both)
    yield both
    for end in both:
        end.close()


def test_chunks_whose_blocks_are_given_away_arrive_as_they_were(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older request's decode takes the blocks of a prompt of which some chunks have not left yet."""
    sender, receiver = ends
    engine = Engine(sender)
    receiver.cache = np.zeros(engine.pool.data.view(torch.uint8).shape, dtype=np.uint8)
    receiver.open("p", 72, ((0, 72),))
    gate = threading.Event()
    push = PeerStream.push

    def held(self: PeerStream, *said: Any) -> object:
        gate.wait()
        return push(self, *said)

    monkeypatch.setattr(PeerStream, "push", held)
    engine.submit("old", 100, 80, "all")
    while engine.core.scheduler.waiting or engine.core.scheduler.progress("old") < 100:
        engine.step()
    engine.submit("p", 72, 4, "prefill")
    engine.desk.take(SendKv(id="p", piece=1, start=0, end=72, to=1))
    while not engine.core.stats().preemptions_total:
        engine.step()
    computed = engine.core.stats().recomputed_tokens_total
    assert 0 < computed < 72
    for _ in range(20):
        engine.step()  # what was its blocks is written over
    gate.set()
    while not engine.core.staged:
        engine.step()
    receiver.until(lambda: bool(receiver.received))
    runs = engine.core.scheduler.block_managers[0].where("p")
    slots = np.concatenate([np.arange(first * BLOCK, (first + count) * BLOCK) for first, count in runs])[:72]
    kept = engine.pool.data[:, :, :, torch.from_numpy(slots)].numpy()
    got = receiver.cache[:, :, :, :72].view(np.float32)
    assert np.abs(kept).max() > 0.1
    np.testing.assert_allclose(got, kept, atol=1e-4)


def test_room_is_reserved_once_and_only_as_far_as_it_exists(ends: tuple[End, End]) -> None:
    engine = Engine(ends[0])
    engine.desk.take(ReserveKv("a", 100))
    engine.desk.take(ReserveKv("a", 100))
    engine.desk.take(ReserveKv("b", 100))
    engine.desk.take(ReserveKv("c", BLOCKS * BLOCK + 1))
    engine.step()
    assert engine.words == [
        SpanTaskLost("a", "a waits for room already, or is computed here"),
        SpanTaskLost("c", "193 tokens do not fit the KV cache of 192"),
        ReserveKv("a", 100),
    ]
    engine.words.clear()
    staged_kv = present(engine.core.scheduler.staged_kv)
    engine.desk.forget("a")
    staged_kv.release("a")
    engine.step()
    assert engine.words == [ReserveKv("b", 100)]


def test_operations_that_no_batch_carries_are_carried_out(ends: tuple[End, End]) -> None:
    """Nothing is computed here, and the block manager's operations do not pile up."""
    engine = Engine(ends[0])
    staged_kv = present(engine.core.scheduler.staged_kv)
    for i in range(2000):
        engine.desk.take(ReserveKv(f"r{i}", 30))
        engine.step()
        engine.desk.forget(f"r{i}")
        staged_kv.release(f"r{i}")
    assert engine.core.scheduler.block_managers[0].pending_ops <= 1100
    executor = engine.core.executor
    assert isinstance(executor, SingleProcessExecutor)
    engine.submit("x", 20, 2, "all")
    engine.step()
    assert executor.worker.tables.owners() == ("x",)


def test_a_pool_that_is_not_in_host_memory_is_refused(ends: tuple[End, End]) -> None:
    engine = Engine(ends[0])
    executor = engine.core.executor
    assert isinstance(executor, SingleProcessExecutor)
    executor.worker.pool.data = executor.worker.pool.data.to("meta")
    with pytest.raises(ConfigError, match="device 'meta': KV moves between pools in host memory only"):
        KvPort(executor.worker, BLOCK, SpanExecutor(executor.worker, ends[0].peers, ()), ends[0].connector, 0)
