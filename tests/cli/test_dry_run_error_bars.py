"""`serve --dry-run` and `cluster --dry-run`: predicted times have error bars, wider beyond what was measured."""

from __future__ import annotations

import msgspec
import pytest

from headway.perf.latency.fitted import prefill_band
from headway.perf.latency.groups import ShardedModel
from headway.runtime.assembly.dry_run import cluster_report, described, loaded
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


def test_pools_are_described_as_soon_as_they_are_known(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.assembly.dry_run.loaded", lambda config: core)
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
