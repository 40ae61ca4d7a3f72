from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.bench import fake_openai_server

from headway.serving.load import load
from headway.serving.load.convoy import ServerProcess

FAKE = (sys.executable, str(Path(fake_openai_server.__file__)))


def headway_bench(*words: str) -> int:
    """Run `headway bench` in this process."""
    parser = argparse.ArgumentParser()
    load.add_arguments(parser)
    return load.run(parser.parse_args(words))


@pytest.fixture
def fake_command() -> str:
    """Command line of the fake server, for `--server-command`."""
    return " ".join(FAKE)


@pytest.fixture
def serve_fake() -> Iterator[object]:
    """A function that starts the fake server with these arguments and returns its address; all are ended afterwards."""
    running: list[ServerProcess] = []

    def start(*arguments: str) -> str:
        server = ServerProcess(arguments, command=FAKE, grace_s=0.2)
        server.__enter__()
        running.append(server)
        return server.url

    yield start
    for server in running:
        server.stop()
