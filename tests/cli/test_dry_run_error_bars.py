"""`serve --dry-run` and `cluster --dry-run`: predicted times have error bars, wider beyond what was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headway.perf.latency.fitted import prefill_band
from headway.perf.latency.groups import GroupShape, ShardedModel
from headway.runtime.assembly.cluster import cluster_plan, measurement
from headway.runtime.assembly.dry_run import (
    capacity,
    cluster_report,
    described,
    loaded,
    prompt_lengths,
    with_longer_iterations,
)
from headway.runtime.cluster.cluster_file import cluster_file
from headway.runtime.embedded import model_path
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore

CONFIG = EngineConfig(model=str(model_path()), latency_profile="quick", threads=1, max_model_len=4096)


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return loaded(CONFIG)


def test_each_predicted_time_of_a_server_has_its_error_bar(core: EngineCore) -> None:
    lines = described(core)
    rows = lines[next(i for i, line in enumerate(lines) if "prompt of this length" in line) + 1 :]
    assert [row.split()[0] for row in rows] == ["0", "1,024"]
    assert "±" not in rows[0]
    band = prefill_band(core.scheduler.latency, 1024)
    assert band is not None
    assert rows[1].endswith(f" s {band.words()}")


def test_the_capacity_of_a_cluster_has_the_error_bars_of_its_prompts(core: EngineCore, tmp_path: Path) -> None:
    file = cluster_file({"pools": [{"count": 2}], "placement": "fifo"}, "cluster.yaml")
    plan = cluster_plan(file, CONFIG.model, [CONFIG] * 2, [measurement(core, CONFIG)] * 2)
    short, long = prompt_lengths(plan.cluster.longest)
    line = next(line for line in capacity(plan) if "error bars" in line)
    bars = "(± \\d+%|at least).*"
    words = rf"  error bars \(P90\) +of times alone.*: {short:,} tokens {bars}; {long:,} tokens {bars}"
    assert re.fullmatch(words, line)


def test_a_capacity_search_simulates_few_iterations_also_where_the_context_is_long(core: EngineCore) -> None:
    file = cluster_file({"pools": [{}]}, "cluster.yaml")
    measured = measurement(core, CONFIG)
    # As for an engine with 1M tokens of context, which has prompts of 262,144.
    info = msgspec.structs.replace(measured.info, context_tokens=1 << 20, kv_tokens_total=1 << 20)
    measured = measured._replace(info=info)
    plan = cluster_plan(file, CONFIG.model, [CONFIG], [measured])
    lengths = prompt_lengths(plan.cluster.longest)
    simulated, left = with_longer_iterations(plan, lengths)
    (engine,) = simulated.cluster.engines
    long_s = plan.rules.latency.prefill_s(0, lengths[1], GroupShape(1))
    assert engine.config.t_target_s is not None
    assert long_s / engine.config.t_target_s < 1000
    assert 0.75 <= left <= 1
    # Iteration times that are set stay as they are.
    given = replace(measured.engine, config=replace(measured.engine.config, t_target_s=0.02))
    plan = cluster_plan(file, CONFIG.model, [CONFIG], [measured._replace(engine=given)])
    simulated, left = with_longer_iterations(plan, lengths)
    assert (simulated.cluster.engines[0].config, left) == (given.config, 1.0)


def test_pools_are_described_before_the_search(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.assembly.dry_run.loaded", lambda config: core)
    monkeypatch.setattr("headway.runtime.assembly.dry_run.capacity", lambda plan: pytest.fail("searched"))
    parts = cluster_report(cluster_file({"pools": [{}]}, "cluster.yaml"), CONFIG.model, [CONFIG])
    assert next(parts).startswith("placement")
    assert "longest context" in next(parts)
    assert "in an idle cluster" in next(parts)


def test_no_chunk_is_longer_than_the_context(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "info", msgspec.structs.replace(core.info, max_model_len=10))
    assert described(core)[-1].split()[:2] == ["0", "10"]


def test_a_prompt_sharded_over_groups_has_the_bar_of_its_table(core: EngineCore) -> None:
    latency = core.scheduler.latency
    sharded = prefill_band(ShardedModel(latency, 512), 4096)
    whole = prefill_band(latency, 4096)
    assert sharded is not None
    assert whole is not None
    assert sharded.extrapolated == whole.extrapolated
