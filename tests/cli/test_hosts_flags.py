"""`headway serve` for several hosts: checks of the flags before anything starts."""

from __future__ import annotations

import pytest

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.runtime.build import hosts
from headway.runtime.engine.config import EngineConfig
from headway.runtime.launcher.secret import check_token

WORLD = ("--tensor-parallel-size", "2", "--nnodes", "2")
THERE = ("--rdzv-endpoint", "127.0.0.1:29999")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.cli.serve.environment", dict)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--node-rank", "1"), "node-rank must be from 0 to nnodes - 1, not 1 of 1"),
        ((*WORLD, *THERE, "--node-rank", "2"), "not 2 of 2"),
        (("--nnodes", "0"), "not 0 of 0"),
        (WORLD, "need --rdzv-endpoint"),
        ((*WORLD, "--rdzv-endpoint", "a:b"), "is not HOST:PORT"),
        (("--tensor-parallel-size", "3", "--nnodes", "2", *THERE), "3 workers, which cannot be spread evenly"),
        ((*WORLD, *THERE, "--rdzv-token", "short"), "at least 16 characters"),
        ((*WORLD, *THERE, "--node-rank", "1"), "set HEADWAY_RDZV_TOKEN to node 0's token"),
        ((*WORLD, *THERE, "--rdzv-timeout", "0"), "more than 0 seconds"),
    ],
)
def test_impossible_host_settings_are_one_line(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("headway: error: ")
    assert words in said
    assert said.count("\n") == 1


def test_node_0_makes_a_token_and_prints_how_to_start_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model="m", tensor_parallel_size=3, nnodes=3, rdzv_endpoint="node0")
    token = hosts.settle_token(config, 0).rdzv_token
    assert token is not None
    check_token(token)
    said = capsys.readouterr().err
    assert f"HEADWAY_RDZV_TOKEN={token}" in said
    assert "--node-rank 1 to 2, --rdzv-endpoint node0:29400" in said


def test_a_token_that_is_given_is_kept_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(
        model="m", pipeline_parallel_size=2, nnodes=2, rdzv_endpoint="node0", rdzv_token="0123456789abcdef"
    )
    assert hosts.settle_token(config, 0) is config
    assert hosts.settle_token(config, 1) is config
    assert capsys.readouterr().err == ""
    assert main(["serve", "--print-config", "--rdzv-token", "0123456789abcdef"]) == 0
    said = capsys.readouterr().out
    assert "rdzv_token: '***'" in said
    assert "0123456789abcdef" not in said


def test_a_host_that_finds_no_server_exits_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr("headway.core.structured_log.setup", lambda level, form: None)
    flags = (*WORLD, *THERE, "--node-rank", "1", "--rdzv-token", "0123456789abcdef", "--rdzv-timeout", "0.5")
    assert main(["serve", *flags]) == 2
    assert "no server answered at 127.0.0.1:29999 within 0.5 s" in capsys.readouterr().err


def test_one_host_needs_no_token() -> None:
    config = EngineConfig(model="m")
    assert hosts.settle_token(config, 0) is config
    with pytest.raises(ConfigError, match="not 1 of 1"):
        hosts.settle_token(config, 1)
