"""Settings that an engine cannot start with are one sentence, found before it starts where that can be."""

from __future__ import annotations

import argparse

import pytest

from headway.cli import serve_options
from headway.cli.dry_run import loaded
from headway.cli.options import combine
from headway.core.errors import ConfigError
from headway.runtime.embedded import model_path
from headway.runtime.engine.config import EngineConfig


@pytest.mark.parametrize("name", ["float16", "half", "Float32", ""])
def test_a_dtype_that_is_none_is_refused_where_it_is_read(name: str) -> None:
    words = rf"^pools\[0\]\.serve: dtype: dtype '{name}' is not supported; supported are auto, float32, bfloat16$"
    with pytest.raises(ConfigError, match=words):
        combine(serve_options.ALL, argparse.Namespace(), {}, {"dtype": name}, "pools[0].serve")


@pytest.mark.parametrize("name", ["auto", "float32", "bfloat16"])
def test_a_dtype_that_is_one_is_taken(name: str) -> None:
    values, given = combine(serve_options.ALL, argparse.Namespace(), {}, {"dtype": name}, "file")
    assert serve_options.engine_config("m", values, given).dtype == name


def test_engines_log_like_their_server() -> None:
    file = {"log_level": "debug", "log_format": "json"}
    values, given = combine(serve_options.ALL, argparse.Namespace(), {}, file, "file")
    config = serve_options.engine_config("m", values, given)
    assert (config.log_level, config.log_format) == ("debug", "json")


def test_kv_memory_that_is_not_there_is_said_in_numbers() -> None:
    config = EngineConfig(model=str(model_path()), kv_cache_bytes=1 << 50, latency_profile="quick")
    with pytest.raises(
        ConfigError,
        match=r"^there is no memory for a KV cache of 1048576\.0 GiB \(\d+ tokens\): [0-9.]+ [GM]iB is avail",
    ):
        loaded(config)
