"""Settings that an engine cannot start with are one-line errors, raised before the start where possible."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.core.settings import resolve
from headway.runtime.assembly.dry_run import loaded
from headway.runtime.embedded import model_path
from headway.runtime.engine.config import EngineConfig
from headway.runtime.launcher import standby
from headway.serving.serve_settings import ServeSettings


@pytest.mark.parametrize("name", ["float16", "half", "Float32", ""])
def test_an_unknown_dtype_is_refused_where_it_is_read(name: str) -> None:
    words = rf"^pools\[0\]\.serve: dtype: dtype '{name}' is not supported; supported are auto, float32, bfloat16$"
    with pytest.raises(ConfigError, match=words):
        resolve(ServeSettings, file={"dtype": name}, origin="pools[0].serve")


@pytest.mark.parametrize("name", ["auto", "float32", "bfloat16"])
def test_a_known_dtype_is_accepted(name: str) -> None:
    assert resolve(ServeSettings, file={"dtype": name}).engine_config("m").dtype == name


def test_engines_log_like_their_server() -> None:
    file = {"log_level": "debug", "log_format": "json"}
    config = resolve(ServeSettings, file=file).engine_config("m")
    assert (config.log_level, config.log_format) == ("debug", "json")


def test_missing_kv_memory_is_refused_with_numbers() -> None:
    config = EngineConfig(model=str(model_path()), kv_cache_bytes=1 << 50, latency_profile="quick")
    with pytest.raises(
        ConfigError,
        match=r"^there is no memory for a KV cache of 1048576\.0 GiB \(\d+ tokens\): [0-9.]+ [GM]iB is avail",
    ):
        loaded(config)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"drain_timeout_s": "-1"}, "must be at least 0"),
        ({"served_model_name": ""}, "a name is empty"),
        ({"served_model_name": "a,,b"}, "a name is empty"),
    ],
)
def test_a_negative_drain_and_an_empty_name_are_refused(setting: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(ServeSettings, flags=setting)


@pytest.mark.parametrize("driver", [False, True])
def test_a_process_is_started_early_where_there_is_no_gpu(
    driver: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[bool] = []
    monkeypatch.delenv("HEADWAY_STANDBY", raising=False)
    monkeypatch.setattr("headway.perf.device.has_driver", lambda: driver)
    monkeypatch.setattr(standby, "start_early", lambda: started.append(True))
    assert main(["cluster", str(tmp_path / "missing.yaml")]) == 2
    assert started == [True] * (not driver)
    assert gc.isenabled()
