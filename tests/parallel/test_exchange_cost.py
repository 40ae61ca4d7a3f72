"""What it costs that groups share a request: measured over their links, kept in the profile, told to schedulers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.parallel.model_families import BLOCK, BLOCKS, checkpoint, core_of, layout_of
from tests.parallel.virtual_ranks import VirtualWorld

from headway.core.batch import ManualClock
from headway.perf.hardware import ParallelLayout
from headway.perf.latency import table as store
from headway.perf.latency.corrected import describe, restore
from headway.perf.latency.groups import ShardExchangeCost, exchange_of
from headway.runtime.assembly.engine import assemble, build_many, latency_source, profile_mark
from headway.runtime.engine.config import EngineConfig
from headway.runtime.executor import measure as measuring
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.executor.plans import MeasuredSeconds, MeasureRank
from headway.runtime.executor.profiling import FULL, QUICK, exchange, profile


def asker(seconds: dict[int, float]) -> Any:
    return lambda kind, rows, other, repeats: seconds[rows]


def test_a_line_is_found_and_disturbed_points_are_not_believed() -> None:
    line = {rows: 1e-3 + 2e-6 * rows for rows in FULL.exchanged}
    assert exchange(asker(line), 10_000, FULL) == pytest.approx((1e-3, 2e-6))
    fixed_s, row_s = exchange(asker({**line, 16: 0.5}), 10_000, FULL)
    assert fixed_s == pytest.approx(1e-3, rel=0.2)
    assert row_s == pytest.approx(2e-6, rel=0.2)


def test_exchanges_larger_than_the_pool_are_not_measured_and_zero_times_cost_nothing() -> None:
    assert exchange(asker({1: 2e-3}), 8, QUICK) == (2e-3, 0.0)
    assert exchange(asker(dict.fromkeys(QUICK.exchanged, 0.0)), 10_000, QUICK) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["K2", "K3", "T2K2", "S2K2"])
def test_groups_pair_up_and_then_serve(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured by the live code: asks meet visits, whoever has no partner is left out, and nothing is left behind."""
    told: list[tuple[str, int]] = []
    real = measuring.measure

    def noted(worker: Any, kind: str, first: int, second: int, repeats: int) -> float:
        told.append((kind, second))
        return real(worker, kind, first, second, repeats)

    monkeypatch.setattr("headway.runtime.executor.rank.measure", noted)
    layout = layout_of(name)
    with VirtualWorld(checkpoint("llama"), layout, BLOCKS, BLOCK) as world:
        assert 0.0 <= world.executor.measure("exchange", 5, 0, 2) < 60.0
        each = layout.tp * layout.stages
        assert sorted(told) == sorted([("ask", layout.kvp - 1)] * each + [("visit", 0)] * each)
        assert world.executor.measure("forward", 4, 0, 1) > 0.0
        core = core_of(world.executor)
        core.scheduler.check()


def test_the_slower_pair_counts() -> None:
    class Wire:
        waits_on = ("queue",)

        def __init__(self) -> None:
            self.asked: list[tuple[int, MeasureRank]] = []

        def send(self, rank: int, frames: Any) -> None:
            self.asked.append((rank, msgspec.msgpack.decode(frames[0], type=MeasureRank)))

        def receive(self, timeout_s: float | None) -> Any:
            rank, asked = self.asked.pop()
            seconds = {0: 0.25, 1: 0.5}.get(rank, 0.0)
            return rank, [msgspec.msgpack.encode(MeasuredSeconds(seconds if asked.kind == "ask" else 0.0))]

    executor = MultiProcessExecutor(Wire(), ParallelLayout(kvp=4))
    assert executor.measure("exchange", 1, 0, 1) == 0.5


def config_of(**fields: Any) -> EngineConfig:
    return EngineConfig(
        model=str(checkpoint("llama")), kv_parallel_size=2, threads=1, kv_cache_bytes=4 << 20, block_size=8, **fields
    )


def test_an_engine_of_two_groups_gets_the_measurements() -> None:
    core = assemble(config_of(latency_profile="quick"), ManualClock())
    try:
        told: ShardExchangeCost = core.scheduler.exchange  # type: ignore[attr-defined]
        assert told.fixed_s > 0.0
        table, _ = restore(msgspec.json.decode(msgspec.json.encode(describe(core.scheduler.latency))))
        assert exchange_of(table.source) == told, "who replays its log starts from the same"
    finally:
        core.executor.close()


def test_a_profile_without_exchange_costs_is_completed(tmp_path: Path) -> None:
    config = config_of()
    built = build_many(config, ParallelLayout(kvp=2))
    built.executor.close()
    known = {"forward": 1e-3, "chunk": 1e-4, "decodes": 1e-4, "exchange": 3e-4}
    built = replace(built, measure=lambda kind, first, second, repeats: known[kind])
    mark = profile_mark(config, built)
    path = tmp_path / "profile.json"
    silent = profile(built.measure, 512, QUICK, 1.0, mark, "test")
    assert silent.exchange is None
    store.save(silent, path)
    config = msgspec.structs.replace(config, latency_profile=str(path))
    completed, confidence = latency_source(config, built)
    assert (msgspec.structs.replace(completed, exchange=None), confidence) == (silent, 20.0)
    assert completed.exchange == pytest.approx((3e-4, 0.0))
    said = msgspec.structs.replace(silent, exchange=(1.0, 2.0))
    store.save(said, path)
    assert latency_source(config, built) == (said, 20.0)
