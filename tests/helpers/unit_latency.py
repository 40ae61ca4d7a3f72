"""Latency models: one to count with, and a small machine; random settings of a scheduler."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from headway.perf.latency.base import BatchLoad, LatencyModel, Seconds
from headway.perf.latency.table import TableLatency, TableSource
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.medha import MedhaConfig


class Linear(LatencyModel):
    """`LatencyModel` where every row costs `row_s` and attention nothing: for arithmetic in the head."""

    def __init__(self, row_s: float = 0.01, fixed_s: float = 0.0) -> None:
        self.row_s, self.fixed_s = row_s, fixed_s

    def token_s(self, first: int, last: int) -> Seconds:
        return self.fixed_s + self.row_s * np.arange(first, last + 1, dtype=np.float64)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        return np.zeros(last - first + 1)

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return 0.0

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """Never learns."""


def small_machine() -> TableLatency:
    """1 ms fixed, 20 µs a row; attention of a chunk grows with what is cached; decodes read their KV."""
    source = TableSource(
        fingerprint="",
        provenance="test",
        tokens=((0, 1e-3), (1, 1.02e-3), (1001, 21.02e-3)),
        chunks=((0, 0.0, 0.0), (1000, 1e-3, 2e-5)),
        decode=(1e-4, 1e-5, 2e-7),
    )
    return TableLatency(source, 4096)


def random_config(rng: random.Random, **fields: Any) -> SchedulerConfig:
    """Return settings with a random policy, under Medha's rules or not, on top of `fields`."""
    policy = rng.choice(("ladder", "ladder", "ladder", "fcfs", "edf", "lrs", "srpt", "lars", "lars"))
    if policy == "ladder":
        return SchedulerConfig(policy=policy, **fields)
    rules = MedhaConfig(space_sharing=policy == "lars" or rng.random() < 0.5, long_tokens=200)
    medha = rules if policy == "lars" or rng.random() < 0.5 else None
    return SchedulerConfig.named(rng.choice(("default", "default", "paper")), policy=policy, medha=medha, **fields)
