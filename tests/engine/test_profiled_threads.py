"""An engine computes by as many threads as its profile was measured with, whatever a start measures."""

from __future__ import annotations

import math
from pathlib import Path
from zlib import crc32

import pytest
import torch
from tests.helpers.checkpoints import make_tiny

from headway.core.errors import ConfigError
from headway.core.machine import CORES
from headway.perf.latency import table
from headway.perf.latency.table import TableSource
from headway.runtime.assembly.engine import build, latency_source, profile_mark
from headway.runtime.engine.config import EngineConfig
from headway.runtime.executor.measure import ComputeThreads


def _profile(mark: str, threads: int) -> TableSource:
    words = mark.split("|")
    words[3] = f"{threads} threads"
    return TableSource(
        fingerprint="|".join(words), provenance="test", tokens=((0, 1e-3), (1000, 11e-3)), chunks=((0, 0.0, 0.0),),
        decode=(0.0, 0.0, 0.0),
    )  # fmt: skip


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_profile_decides_how_many_threads_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, named: bool
) -> None:
    if threads > len(CORES):
        pytest.skip("there is one core")
    # Not XDG_CACHE_HOME, where compiled kernels lie too.
    monkeypatch.setattr(table, "default_path", lambda mark: tmp_path / f"{crc32(mark.encode())}.json")
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, len(CORES)))
    # What a start measures says the opposite.
    wanted = ComputeThreads._settle

    def opposite(self: ComputeThreads, rows: int, gain: float, keep: bool, busy: bool) -> None:
        wanted(self, rows, 2.0 if threads == 1 else 0.5, keep, False)

    monkeypatch.setattr(ComputeThreads, "_settle", opposite)
    try:
        model = str(make_tiny("llama", tmp_path / "model"))
        config = EngineConfig(model=model, kv_cache_bytes=1 << 20, latency_profile="auto", threads=None)
        built = build(config)
        assert built.threads == (2 if threads == 1 and len(CORES) > 1 else 1)
        profile = _profile(profile_mark(config, built), threads)
        path = tmp_path / "profile.json" if named else table.default_path(profile.fingerprint)
        table.save(profile, path)
        config = EngineConfig(
            model=model, kv_cache_bytes=1 << 20, latency_profile=str(path) if named else "auto", threads=None
        )
        torch.set_num_threads(min(2, len(CORES)))
        built = build(config)
        assert built.threads == threads
        assert latency_source(config, built) == (profile, 20.0)
        # A number that the user names is kept, and a profile of another one refused.
        if named and len(CORES) > 1:
            config = EngineConfig(model=model, kv_cache_bytes=1 << 20, latency_profile=str(path), threads=3 - threads)
            with pytest.raises(ConfigError, match="was measured for"):
                latency_source(config, build(config))
    finally:
        torch.set_num_threads(before)


def test_chunks_over_a_history_are_measured_by_the_threads_of_a_deep_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slope of a chunk's time is extrapolated to histories at which its attention occupies all threads."""
    model = str(make_tiny("llama", tmp_path / "model"))
    built = build(EngineConfig(model=model, kv_cache_bytes=1 << 20, latency_profile="quick", threads=None))
    begun: list[float] = []
    begin = ComputeThreads.begin

    def recorded(self: ComputeThreads, now: float, rows: float) -> None:
        begun.append(rows)
        begin(self, now, rows)

    monkeypatch.setattr(ComputeThreads, "begin", recorded)
    for past in (0, 16, 64):
        built.measure("chunk", 8, past, 1)
    assert begun == [8, math.inf, math.inf]
