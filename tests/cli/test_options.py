"""Sources of settings, notation of numbers, and errors of wrong values."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.core.parse import duration, milliseconds, size, tokens
from headway.core.settings import (
    Flag,
    Number,
    SettingsModel,
    Text,
    TextList,
    TokenCount,
    WholeNumber,
    add_options,
    given_flags,
    overlay,
    print_config,
    resolve,
    unknown_variables,
)
from headway.core.strict_yaml import read_yaml


class CommandSettings(SettingsModel):
    port: WholeNumber = Field(8000, ge=0, le=65535, description="where to listen")
    max_model_len: TokenCount | None = Field(None, description="longest context")
    t_target: Number = Field(0.5, gt=0, description="seconds")
    quiet: Flag = Field(False, description="say less, 100% less")
    level: Literal["high", "low"] = Field("low", description="how much")
    api_key: Text | None = Field(None, description="the key")
    names: TextList = Field((), description="names")


def resolved(words: list[str], environment: dict[str, str], config: Path | None = None) -> CommandSettings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, CommandSettings)
    flags = given_flags(CommandSettings, parser.parse_args(words))
    file = read_yaml(str(config)) if config else {}
    return resolve(CommandSettings, flags=flags, environment=environment, file=file, origin=str(config))


def parse(words: list[str], environment: dict[str, str], config: Path | None = None) -> dict[str, Any]:
    return resolved(words, environment, config).model_dump()


def yaml_file(folder: Path, text: str | bytes) -> Path:
    path = folder / "headway.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "port: 3\nmax-model-len: 4K\n")
    environment = {"HEADWAY_PORT": "2"}
    assert parse(["--port", "1"], environment, config)["port"] == 1
    assert parse([], environment, config)["port"] == 2
    assert parse([], {}, config)["port"] == 3
    assert parse([], {})["port"] == 8000
    assert parse([], {}, config)["max_model_len"] == 4096
    assert parse(["--max-model-len", "1M"], {}, config)["max_model_len"] == 1 << 20


def test_given_settings_are_distinguished_from_defaults(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "quiet: on\napi_key:\n")
    settings = resolved(["--port", "8000"], {"HEADWAY_T_TARGET": "2"}, config)
    assert settings.model_fields_set == {"port", "t_target", "quiet"}


def test_an_overlay_takes_only_what_was_given() -> None:
    base, over = resolved(["--port", "1", "--quiet"], {}), resolved(["--port", "8000"], {})
    both = overlay(base, over)
    assert (both.port, both.quiet, both.model_fields_set) == (8000, True, {"port", "quiet"})


def test_several_wrong_settings_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^HEADWAY_PORT: 'x' is not .*; .*yaml: quiet: 'maybe' is neither"):
        parse([], {"HEADWAY_PORT": "x"}, yaml_file(tmp_path, "quiet: maybe\n"))


def test_settings_made_by_a_program_are_checked_alike() -> None:
    with pytest.raises(ConfigError, match=r"^port: must be at most 65535, not 70000$"):
        CommandSettings(port=70000)
    with pytest.raises(ConfigError, match=r"^prot: there is no such setting$"):
        CommandSettings(prot=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "examples/chat-and-documents.yaml"),
        ("reproduce", "medha.eq1"),
        ("plan", "examples/plan-chat-and-documents.yaml"),
    ],
)
def test_fewer_than_no_processes_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    command, file = words
    here = str(Path(__file__).resolve().parents[2] / file) if file.endswith(".yaml") else file
    assert main([command, here, "--jobs", "-1"]) == 2
    assert capsys.readouterr().err == "headway: error: --jobs must be 0 (one process a core) or more, not -1\n"


def test_a_flag_without_a_value_means_true_and_a_value_still_counts() -> None:
    assert parse(["--quiet"], {})["quiet"] is True
    assert parse(["--quiet", "no"], {})["quiet"] is False
    assert parse([], {"HEADWAY_QUIET": "yes"})["quiet"] is True


def test_an_unknown_key_is_refused_with_those_that_are_close(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"headway.yaml: unknown setting 'prot'; did you mean port\\?"):
        parse([], {}, yaml_file(tmp_path, "prot: 1\n"))
    with pytest.raises(ConfigError, match="unknown setting 'max_len'; did you mean max_model_len\\?"):
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
        (["--t-target", "0"], {}, "", "^--t-target: must be above 0, not 0.0$"),
        ([], {"HEADWAY_PORT": "70000"}, "", "^HEADWAY_PORT: must be at most 65535, not 70000$"),
        ([], {}, "level: middle\n", "level: must be 'high' or 'low', not 'middle'"),
        ([], {}, "t_target: 1\nt-target: 2\n", "'t_target' and 't-target' are one setting: say it once"),
    ],
)
def test_a_wrong_value_is_refused_with_its_source(
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


EXAMPLES = {
    path: "plan" if "plan" in str(path) else "accel" if path.parent.name == "accel" else None
    for path in sorted((Path(__file__).resolve().parents[2] / "examples").rglob("*.yaml"))
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_file_given_to_another_command_is_told_its_own(path: Path) -> None:
    kind = EXAMPLES[path] or ("cluster" if "\npools:" in path.read_text() else "simulate")
    for command in ("cluster", "plan", "accel", "simulate", "serve"):
        if command == kind:
            assert read_yaml(str(path), commands=(command,))
            continue
        with pytest.raises(
            ConfigError, match=f"{path.name} is a file for `headway {kind}`, not for `headway {command}`$"
        ):
            read_yaml(str(path), commands=(command,))


def test_a_missing_file_is_refused_and_an_empty_one_is_no_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.yaml"):
        parse([], {}, tmp_path / "none.yaml")
    assert parse([], {}, yaml_file(tmp_path, "# nothing\n")) == parse([], {})


def test_a_printed_config_gives_the_same_settings_and_never_shows_the_key(tmp_path: Path) -> None:
    values = parse(["--port", "9", "--max-model-len", "2K", "--names", "a,b", "--quiet"], {})
    assert parse([], {}, yaml_file(tmp_path, print_config(values))) == values
    assert "hunter2" not in print_config(parse(["--api-key", "hunter2"], {}))


def test_tokens_and_sizes_as_people_write_them() -> None:
    counts = {
        "8192": 8192, 8192: 8192, "128k": 128_000, "128K": 131_072, "1M": 1 << 20, "1m": 10**6, "1.5K": 1536,
        " 2 M ": 2 << 20, "1e5": 100_000, "0": 0,
    }  # fmt: skip
    assert {text: tokens(text) for text in counts} == counts
    sizes = {"4G": 4 << 30, "512MiB": 512 << 20, "512MB": 512 << 20, "1T": 1 << 40, "4g": 4 * 10**9, "77": 77, "2B": 2}
    assert {text: size(text) for text in sizes} == sizes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("55ms", 0.055), ("0.055s", 0.055), ("30", 30.0), (30, 30.0), ("5 min", 300.0), ("1h", 3600.0), ("20us", 2e-5)],
)
def test_times_as_people_write_them(text: str | int, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds, rel=1e-12)
    assert milliseconds(f"{seconds:.9f}s") == pytest.approx(1000 * seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "ms", "5 parsecs", "1s2", "0x10s"])
def test_what_is_no_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a time such as 55ms or"):
        duration(text)


def test_a_variable_that_no_setting_has_is_said_with_the_near_name() -> None:
    variables = {"HEADWAY_PROT": "1", "HEADWAY_ISA": "amx", "HEADWAY_SERVICE_HOST": "10.0.0.1", "PORT": "2"}
    assert unknown_variables(CommandSettings, variables) == [
        "HEADWAY_PROT is set and no setting has that name: did you mean HEADWAY_PORT?"
    ]


def test_the_address_that_kubernetes_gives_of_a_service_of_that_name_is_no_port() -> None:
    assert parse([], {"HEADWAY_PORT": "tcp://10.0.0.1:8000"})["port"] == 8000


@pytest.mark.parametrize("text", ["", "k", "-1", "1x", "1e999", "1..5k", "1 2", "55ms", "nan", "0x10"])
def test_a_malformed_number_of_tokens_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a number of tokens such as 8192, 128K"):
        tokens(text)


@pytest.mark.parametrize(
    ("text", "message"), [("1.5", "whole number"), ("0.0001k", "whole number"), ("9" * 200, "more than")]
)
def test_impossible_amounts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokens(text)


@given(st.integers(0, 2**62))
def test_large_numbers_are_exact(count: int) -> None:
    assert size(str(count)) == count
