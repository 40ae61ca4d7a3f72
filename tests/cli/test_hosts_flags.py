"""`headway serve` for several hosts: checks of the flags before anything starts."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from tests.cli.refusals import refusal

from headway.core.errors import ConfigError
from headway.runtime.launcher.ray_hosts import join_ray

WORLD = ("--tensor-parallel-size", "2", "--nnodes", "2")
THERE = ("--ray-address", "127.0.0.1:29999")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.cli.serve.environment", dict)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--nnodes", "0"), "nnodes must be at least 1, not 0"),
        (WORLD, "several hosts need --ray-address"),
        (("--tensor-parallel-size", "3", "--nnodes", "2", *THERE), "3 workers, which cannot be spread evenly"),
    ],
)
def test_impossible_host_settings_are_one_line(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(["serve", *flags], capsys)


def test_without_ray_several_hosts_are_refused_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import_it = builtins.__import__

    def absent(name: str, *words: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return import_it(name, *words)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"pip install 'headway\[ray\]'"):
        join_ray("auto", 2, int, "model", 1.0)
