"""The port is bound before the model is loaded, and a refusal by the system is a one-line error."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.serving.settings import bind, release, url


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use by a listening socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_bound_port_refuses_connections_until_it_listens() -> None:
    (held,) = bind("127.0.0.1", 0)
    port = held.getsockname()[1]
    assert url("127.0.0.1", held) == f"http://127.0.0.1:{port}"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    held.listen()
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    release([held])
    release([held])


def test_an_address_of_ipv6_is_in_brackets() -> None:
    try:
        (held,) = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    assert url("::1", held) == f"http://[::1]:{held.getsockname()[1]}"
    held.close()


def test_a_port_in_use_is_named_in_the_error(taken: int) -> None:
    with pytest.raises(ConfigError, match=rf"^port {taken} of 127\.0\.0\.1 is in use: .*--port$"):
        bind("127.0.0.1", taken)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "999.1.1.1", "a" * 70])
def test_an_unknown_host_is_named_in_the_error(host: str) -> None:
    with pytest.raises(ConfigError, match="it is no address, nor a name that can be resolved"):
        bind(host, 0)


def test_an_address_of_another_machine_is_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on port 80 of 192\.0\.2\.1: Cannot assign requested address"):
        bind("192.0.2.1", 80)


@pytest.mark.parametrize("command", ["serve", "cluster"])
def test_nothing_is_loaded_where_the_port_is_in_use(command: str, taken: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of the server that runs")
    words = [command, "--port", str(taken), "--event-log", str(log)]
    if command == "cluster":
        file = tmp_path / "cluster.yaml"
        file.write_text("{placement: jsq, pools: [{count: 2}]}")
        words.append(str(file))
    done = subprocess.run([sys.executable, "-c", STARTS_NOTHING, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        f"headway: error: port {taken} of 127.0.0.1 is in use: end the server there, or choose another with --port\n"
    )
    assert log.read_text() == "of the server that runs"


STARTS_NOTHING = """
import subprocess, sys
from headway.cli.main import main
from headway.runtime.launcher import standby as engine_template

started = []

class LibrariesOnly(subprocess.Popen):
    # The command lets a process import libraries while it reads its settings; it is to be given no model.
    def __init__(self, words, **fields):
        assert engine_template.TEMPLATE in words, "a process was started"
        super().__init__(words, **fields)
        started.append(self)

def refused(*words, **fields):
    raise AssertionError("a model is loaded")

subprocess.Popen, engine_template.EngineTemplate.__init__ = LibrariesOnly, refused
status = main()
assert started and all(each.poll() is not None for each in started)
sys.exit(status)
"""
