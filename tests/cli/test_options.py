"""Where a setting comes from, how numbers are written, and what a wrong one is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cli.options import SettingOption, add_options, boolean, print_config, resolve
from headway.core.errors import ConfigError
from headway.core.units import size, tokens

OPTIONS = (
    SettingOption("port", int, 8000, "where to listen"),
    SettingOption("max_model_len", tokens, None, "longest context"),
    SettingOption("t_target", float, 0.5, "seconds"),
    SettingOption("quiet", boolean, False, "say less, 100% less"),
    SettingOption("api_key", str, None, "the key"),
    SettingOption("names", lambda v: tuple(v) if isinstance(v, list) else tuple(v.split(",")), (), "names"),
)


def parse(words: list[str], environment: dict[str, str], config: Path | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, OPTIONS)
    values, _ = resolve(OPTIONS, parser.parse_args(words), environment, str(config) if config else None)
    return values


def yaml_file(folder: Path, text: str | bytes) -> Path:
    path = folder / "headway.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "port: 3\nmax-model-len: 4k\n")
    environment = {"HEADWAY_PORT": "2"}
    assert parse(["--port", "1"], environment, config)["port"] == 1
    assert parse([], environment, config)["port"] == 2
    assert parse([], {}, config)["port"] == 3
    assert parse([], {})["port"] == 8000
    assert parse([], {}, config)["max_model_len"] == 4096
    assert parse(["--max-model-len", "1M"], {}, config)["max_model_len"] == 1 << 20


def test_who_was_given_is_told_apart_from_defaults(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, OPTIONS)
    arguments = parser.parse_args(["--port", "8000"])
    config = yaml_file(tmp_path, "quiet: on\napi_key:\n")
    _, given_names = resolve(OPTIONS, arguments, {"HEADWAY_T_TARGET": "2"}, str(config))
    assert given_names == {"port", "t_target", "quiet"}


def test_a_flag_without_a_value_means_true_and_a_value_still_counts() -> None:
    assert parse(["--quiet"], {})["quiet"] is True
    assert parse(["--quiet", "no"], {})["quiet"] is False
    assert parse([], {"HEADWAY_QUIET": "yes"})["quiet"] is True


def test_an_unknown_key_is_refused_with_those_that_are_close(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"headway.yaml: unknown setting 'prot'; did you mean one of: .*port"):
        parse([], {}, yaml_file(tmp_path, "prot: 1\n"))
    with pytest.raises(ConfigError, match="unknown setting 'max_len'; did you mean one of: max_model_len\\?"):
        parse([], {}, yaml_file(tmp_path, "max_len: 1\n"))


@pytest.mark.parametrize(
    ("words", "environment", "text", "message"),
    [
        (["--port", "x"], {}, "", "^--port: 'x' is not a whole number$"),
        ([], {"HEADWAY_PORT": "1.5"}, "", "HEADWAY_PORT: '1.5' is not a whole number"),
        ([], {}, "port: abc\n", "headway.yaml: port: .*'abc'"),
        ([], {}, "port: 16.5\n", "port: 16.5 is not a whole number"),
        ([], {}, "port: true\n", "port: True is not a whole number"),
        ([], {}, "t_target: false\n", "t_target: False is not a number"),
        (["--t-target", "nan"], {}, "", "--t-target: 'nan' is not a finite number"),
        ([], {}, "t_target: .inf\n", "t_target: inf is not a finite number"),
        ([], {}, "quiet: perhaps\n", "quiet: 'perhaps' is neither true nor false"),
        ([], {}, "port: [1]\n", r"headway.yaml: port: \[1\] is not a whole number"),
        (["--t-target", "fast"], {}, "", "^--t-target: 'fast' is not a number$"),
        ([], {}, "t_target: 1\nt-target: 2\n", "'t_target' and 't-target' are one setting: say it once"),
    ],
)
def test_a_wrong_value_is_told_where_it_came_from(
    words: list[str], environment: dict[str, str], text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(words, environment, yaml_file(tmp_path, text))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "must be a mapping of settings"),
        (b"1: 2\n", ": 1 is not the name of a setting: these are words, such as 'port: 8000'"),
        (b"port: [1\n", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"!!python/object/apply:os.system [echo]\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"headway.yaml.*{message}"):
        parse([], {}, yaml_file(tmp_path, content))


def test_a_missing_file_is_refused_and_an_empty_one_is_no_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml"):
        parse([], {}, tmp_path / "none.yaml")
    assert parse([], {}, yaml_file(tmp_path, "# nothing\n")) == parse([], {})


def test_what_is_printed_gives_the_same_settings_and_never_shows_the_key(tmp_path: Path) -> None:
    values = parse(["--port", "9", "--max-model-len", "2k", "--names", "a,b", "--quiet"], {})
    assert parse([], {}, yaml_file(tmp_path, print_config(values))) == values
    assert "hunter2" not in print_config(parse(["--api-key", "hunter2"], {}))


@pytest.mark.parametrize(
    ("text", "count"),
    [("8192", 8192), (8192, 8192), ("128k", 131_072), ("1M", 1 << 20), ("1.5K", 1536), (" 2 m ", 2 << 20), ("0", 0)],
)
def test_tokens_as_people_write_them(text: str | int, count: int) -> None:
    assert tokens(text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [("4G", 4 << 30), ("512MiB", 512 << 20), ("512MB", 512 << 20), ("1t", 1 << 40), ("77", 77), ("2B", 2)],
)
def test_sizes_as_people_write_them(text: str, count: int) -> None:
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "k", "-1", "1x", "1e5", "1..5k", "1 2", "1T", "nan", "0x10"])
def test_what_is_no_number_of_tokens_is_told_what_would_be(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a number of tokens such as 8192, 128k or 1M"):
        tokens(text)


@pytest.mark.parametrize(
    ("text", "message"), [("1.5", "whole number"), ("0.0001k", "whole number"), ("9" * 400, "more than")]
)
def test_impossible_amounts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokens(text)


@given(st.integers(0, 2**62))
def test_large_numbers_are_exact(count: int) -> None:
    assert size(str(count)) == count
