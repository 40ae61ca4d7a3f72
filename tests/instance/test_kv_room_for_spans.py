"""Room for a run that is computed piece by piece: all of it is there, or asked for, before the first piece begins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.random_weights import random_decoder, reference_config

from headway.core.request import SamplingParams, SpanTask
from headway.runtime.engine.protocol import ComputeSpan
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.kv_transfer.peers import PeerNetwork
from headway.runtime.sequence_parallel.spans import SpanExecutor

BLOCK = 64


@pytest.mark.parametrize("first", [20, 50, 64])
def test_blocks_for_all_pieces_of_a_span_are_reserved_before_the_first(tmp_path: Path, first: int) -> None:
    torch.manual_seed(0)
    shape = dataclasses.replace(reference_config(512), layers=1, max_model_len=512)
    worker = ModelWorker(random_decoder(shape, torch.float32), 8, BLOCK, ())
    peers = PeerNetwork(0, 0, f"unix:{tmp_path}/p", "secret")
    runs = SpanExecutor(worker, peers, ())
    asked: list[int] = []

    def room(tokens: int, anew: bool) -> list[tuple[int, int]]:
        asked.append(tokens)
        return [(0, -(-tokens // BLOCK) * BLOCK)]

    prompt = np.arange(5, 205, dtype=np.int32)
    runs.admit("r", memoryview(prompt.tobytes()), SamplingParams(max_tokens=4), ())
    short, long = SpanTask(0, first, (0,)), SpanTask(first, 200, (0,), rows=8)
    for run, before in ((short, ()), (long, (short,))):
        compute = ComputeSpan(id="r", index=0, run=run, before=before, last=run is long)
        runs.begin(compute, room, lambda: None)
        there = list(asked)
        assert runs.go("r", None, lambda layers: None)
        assert asked == there, "room is asked for in the middle of a run"
        runs.finish("r")
    assert asked == [first, 200]
    peers.close()
