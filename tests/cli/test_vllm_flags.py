"""Every flag of vLLM's `serve` on the native engine's command line: accepted, mapped, or refused in one line."""

from __future__ import annotations

import argparse

import pytest

from headway.cli import vllm_flags
from headway.cli.command_parser import CommandParser
from headway.cli.options import given_flags
from headway.cli.serve import add_arguments, settings_of
from headway.cli.start_settings import StartSettings
from headway.cli.vllm_flags import ALIASES, INHERENT
from headway.core.settings import flag_of

VERSION, FLAGS = vllm_flags.vllm_flags()
OWN = {flag_of(name) for name in StartSettings.model_fields} | {"--config"}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    made = CommandParser(prog="headway serve")
    add_arguments(made)
    return made


def values(flag: str) -> list[str]:
    """Values for a flag: those that it is accepted with, where only some are."""
    count = {"0": 0, "1": 1, "?": 1, "+": 1}[FLAGS[flag]]
    return [(INHERENT.get(flag) or ("7",))[0]] * count


def test_the_list_is_of_a_version_that_the_scheduler_knows() -> None:
    from headway.vllm.version_check import KNOWN

    assert VERSION in KNOWN
    assert len(FLAGS) > 400
    assert set(FLAGS.values()) == {"0", "1", "?", "+"}


def test_every_flag_of_vllm_is_accepted_mapped_or_refused_in_one_line(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted = set()
    for flag in FLAGS:
        words = ["MODEL", flag, *values(flag)]
        try:
            given, unknown = parser.parse_known_args(words)
        except SystemExit:
            line = capsys.readouterr().err
            assert line.count("\n") == 1
            assert line.startswith(f"headway serve: error: {flag}")
            assert "or use --engine vllm" in line
            continue
        accepted.add(flag)
        assert (given.model_tag, unknown) == ("MODEL", [])
        settings = given_flags(StartSettings, given)
        # A flag with an effect has it on the setting of its own name, or of the name that it is mapped to.
        if flag in INHERENT:
            assert settings == {}
        elif flag != "--config":
            assert [flag_of(name) for name in settings] == [ALIASES.get(flag, flag).replace("--no-", "--")]
            assert "7" in next(iter(settings.values())) or FLAGS[flag] == "0"
    booleans = {flag for flag in FLAGS if flag.replace("--no-", "--") in OWN}
    assert accepted == (OWN & set(FLAGS)) | booleans | set(ALIASES) | set(INHERENT)
    assert len(accepted) > 50


def test_a_value_of_a_refused_flag_never_becomes_the_model(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in FLAGS:
        if FLAGS[flag] in "1?":
            try:
                given, _ = parser.parse_known_args([flag, *values(flag), "MODEL"])
            except SystemExit:
                assert flag in capsys.readouterr().err
            else:
                assert given.model_tag == "MODEL", flag


def test_what_is_said_of_vllm_s_flags_is_of_flags_that_exist() -> None:
    told = set(ALIASES) | set(INHERENT) | set(vllm_flags._ADVICE)
    assert told - set(FLAGS) == set()
    assert {flag.replace("--no-", "--") for flag in ALIASES.values()} <= OWN


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu-memory-utilization", "0.9"], "0.9 is vLLM's and not the native engine's: say --kv-cache-memory SIZE"),
        (["--gpu_memory_utilization=0.9"], "--gpu-memory-utilization 0.9 is vLLM's"),
        (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 is vLLM's and not the native engine's: leave it out"),
        (["-dp", "2"], "`headway cluster` runs several engines"),
        (["--enable-lora"], "--enable-lora is vLLM's"),
    ],
)
def test_a_refusal_says_what_to_do(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_known_args(words)
    assert message in capsys.readouterr().err


def test_mapped_flags_and_flags_with_underscores_set_what_they_name(parser: argparse.ArgumentParser) -> None:
    words = ["-tp", "2", "--kv-cache-memory-bytes", "1G", "--max_model_len=4k", "--kv-cache-dtype", "auto", "M"]
    settings = settings_of(parser.parse_args(words))
    assert settings.tensor_parallel_size == 2
    assert settings.kv_cache_memory == 1 << 30
    assert (settings.max_model_len, settings.model) == (4096, "M")


def test_flags_are_never_abbreviated(parser: argparse.ArgumentParser) -> None:
    _, unknown = parser.parse_known_args(["--max-model", "4k"])
    assert unknown == ["--max-model"]


def test_several_served_names_may_follow_one_flag(parser: argparse.ArgumentParser) -> None:
    settings = settings_of(parser.parse_args(["M", "--served-model-name", "a", "b"]))
    assert settings.served_model_name == ("a", "b")
