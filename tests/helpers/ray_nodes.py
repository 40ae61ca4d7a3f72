"""Ray for tests: where it is, and a cluster of its nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.helpers.polling import until

ROOT = Path(__file__).parents[2]
BESIDE = ROOT / ".ray"
"""Where `make ray` installs it."""
TOKEN = "a-token-of-the-tests"


def environment() -> dict[str, str]:
    """Return the environment of processes that use Ray, with its token authentication. Skips the test without Ray."""
    if find_spec("ray") is None and not (BESIDE / "ray").is_dir():
        pytest.skip("needs Ray, in this environment or in .ray: make ray")
    paths = [str(ROOT), *([str(BESIDE)] if BESIDE.is_dir() else []), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
    }


class RayNodes:
    """A head node and others, each with two CPUs."""

    def __init__(self, variables: dict[str, str]) -> None:
        self.variables = variables
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.ray_cluster_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables,
        )
        self.address = self._line()

    def add(self) -> None:
        """Add a node."""
        self._tell("add")

    def kill(self) -> None:
        """Kill the newest node, with all that runs on it."""
        self._tell("kill")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._line() == "done"

    def _line(self) -> str:
        """The next line, without what Ray itself prints."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line == "done\n" or line.count(":") == 1:
                return line.strip()
        raise AssertionError("the Ray cluster's process has ended")


@contextmanager
def ray_nodes(others: int = 1) -> Iterator[RayNodes]:
    """A Ray cluster with so many nodes beside the head."""
    nodes = RayNodes(environment())
    try:
        for _ in range(others):
            nodes.add()
        yield nodes
    finally:
        nodes.close()
        until(lambda: nodes._process.poll() is not None)
