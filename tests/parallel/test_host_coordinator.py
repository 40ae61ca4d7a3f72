"""Hosts that join node 0 over the loopback: authentication, assignment of ranks, and the effect of silence."""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.polling import until

from headway.core.errors import CheckpointError, ConfigError
from headway.core.ports import free_port
from headway.perf.latency.layout import ParallelLayout
from headway.runtime.embedded import model_path
from headway.runtime.executor.rank_config import RankConfig
from headway.runtime.launcher.host_agent import HostAgent
from headway.runtime.launcher.host_compatibility import check_nodes, node_of, terms
from headway.runtime.launcher.host_coordinator import HostCoordinator
from headway.runtime.launcher.host_messages import HostHello, ObservedState
from headway.runtime.launcher.network import HostEndpoint, address_towards, interface_of, parse_endpoint, resolve
from headway.runtime.launcher.rank_launcher import RankLauncher
from headway.runtime.launcher.remote_rank import RemoteProcess
from headway.runtime.launcher.secret import check_token, guard_client, new_token
from headway.runtime.model.identity import identity

LAYOUT = ParallelLayout(tp=2)
TOKEN = new_token()
LOST_S = 2.0
rank_node = partial(node_of, nodes=2, layout=LAYOUT)


@pytest.fixture(scope="module")
def model() -> Path:
    return model_path()


@pytest.fixture
def endpoint() -> HostEndpoint:
    return HostEndpoint("127.0.0.1", free_port())


@contextmanager
def node0(
    endpoint: HostEndpoint, model: Path, patience_s: float = 20.0, lost_s: float = 10.0
) -> Iterator[HostCoordinator]:
    meeting = HostCoordinator(endpoint, TOKEN, terms(0, 2, LAYOUT, str(model)), rank_node, patience_s, lost_s)
    try:
        yield meeting
    finally:
        meeting.close()


class Joining:
    """A host in a thread of this process."""

    def __init__(
        self, endpoint: HostEndpoint, folder: Path, token: str = TOKEN, patience_s: float = 20.0, **changes: Any
    ) -> None:
        mine = msgspec.structs.replace(terms(1, 2, LAYOUT, str(folder)), **changes)
        self.host = HostAgent(endpoint, token, mine, RankLauncher(str(folder), 1, mine, LAYOUT), patience_s)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.host.run()
        except Exception as error:
            logging.getLogger("headway.host").warning("ended by %r", error)
            self.error = error

    def ended(self) -> Exception | None:
        """Wait for its end; with which error."""
        self.thread.join(20.0)
        assert not self.thread.is_alive()
        return self.error

    def leave(self) -> None:
        self.host.end()
        assert self.ended() is None


# -- who is let in ---------------------------------------------------------------------------------------------------


def test_a_host_joins_and_ends_with_node_0(endpoint: HostEndpoint, model: Path) -> None:
    with node0(endpoint, model) as meeting:
        host = Joining(endpoint, model)
        mine, other = meeting.gather()
        assert (mine.node, other.node) == (0, 1)
        assert other.model == mine.model == identity(model)
        assert other.available_bytes > 0
        until(lambda: meeting._hosts[1].clocks)
        assert abs(meeting.ahead_s(1)) < 0.05, "both have one clock"
    assert host.ended() is None


def test_the_clock_of_a_host_that_has_left_is_still_known(
    endpoint: HostEndpoint, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its processes said last is read when it has gone."""
    kept = HostAgent._kept

    def elsewhere(host: HostAgent, echo_s: float) -> ObservedState:
        said = kept(host, echo_s)
        return msgspec.structs.replace(said, now_s=said.now_s + 1e6)

    monkeypatch.setattr(HostAgent, "_kept", elsewhere)
    with node0(endpoint, model) as meeting:
        host = Joining(endpoint, model)
        until(lambda: meeting.ahead_s(1))
        host.leave()
        until(lambda: not meeting._hosts)
        assert abs(meeting.ahead_s(1) + 1e6) < 0.5


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("version", "0.0.9", "runs Headway 0.0.9"),
        ("protocol", 99, "install the same version"),
        ("layout", "tp1-pp2-kvp1", "tp1-pp2-kvp1, and node 0 for tp2-pp1-kvp1"),
        ("nodes", 3, "--nnodes 3"),
        ("node", 2, "--node-rank 2"),
        ("model", "0123456789abcdef", r"another model \(0123456789abcdef\)"),
    ],
)
def test_a_host_that_differs_is_refused_with_the_reason(
    endpoint: HostEndpoint, model: Path, field: str, value: Any, words: str
) -> None:
    with node0(endpoint, model) as meeting:
        error = Joining(endpoint, model, **{field: value}).ended()
        assert isinstance(error, ConfigError)
        with pytest.raises(ConfigError, match=words):
            raise error
        assert not meeting._hosts


def test_another_token_is_rejected_with_the_reason(endpoint: HostEndpoint, model: Path) -> None:
    with node0(endpoint, model) as meeting:
        error = Joining(endpoint, model, token=new_token()).ended()
        assert "does not take this host's token" in str(error)
        assert not meeting._hosts


@pytest.mark.parametrize("guarded", [False, True])
def test_the_engines_socket_accepts_no_peer_without_the_token(
    endpoint: HostEndpoint, model: Path, guarded: bool
) -> None:
    context = zmq.Context()
    with node0(endpoint, model) as meeting:
        engine, stranger, friend = context.socket(zmq.ROUTER), context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        address = meeting.open(engine)
        assert address.startswith("tcp://127.0.0.1:")
        if guarded:
            guard_client(stranger, new_token())
        guard_client(friend, TOKEN)
        for socket, word in ((stranger, b"let me in"), (friend, b"it is me")):
            socket.linger = 0
            socket.connect(address)
            socket.send(word)
        assert engine.poll(5000)
        assert engine.recv_multipart()[1] == b"it is me"
        assert not engine.poll(300)
        for socket in (engine, stranger, friend):
            socket.close()
    context.term()


def test_nonsense_is_answered_and_survived(endpoint: HostEndpoint, model: Path) -> None:
    context = zmq.Context()
    with node0(endpoint, model) as meeting:
        socket = context.socket(zmq.DEALER)
        guard_client(socket, TOKEN)
        socket.connect(f"tcp://{endpoint}")
        socket.send(b"\xc1")
        assert socket.poll(5000)
        assert b"does not understand" in socket.recv()
        socket.close()
        host = Joining(endpoint, model)
        meeting.gather()
    assert host.ended() is None
    context.term()


def test_a_second_host_of_the_same_rank_is_refused(endpoint: HostEndpoint, model: Path) -> None:
    with node0(endpoint, model) as meeting:
        first = Joining(endpoint, model)
        meeting.gather()
        assert "another process with --node-rank 1" in str(Joining(endpoint, model).ended())
        assert first.thread.is_alive()


def test_both_sides_wait_for_a_stated_time(endpoint: HostEndpoint, model: Path) -> None:
    with node0(endpoint, model, patience_s=0.6) as meeting, pytest.raises(ConfigError, match=r"--node-rank 1 .* 0.6 s"):
        meeting.gather()
    alone = Joining(HostEndpoint("127.0.0.1", free_port()), model, patience_s=0.6)
    assert "no server answered" in str(alone.ended())


def test_a_port_in_use_is_an_error_that_names_it(endpoint: HostEndpoint, model: Path) -> None:
    with (
        node0(endpoint, model),
        pytest.raises(ConfigError, match=f"cannot listen at {endpoint}"),
        node0(endpoint, model),
    ):
        pass


# -- who runs what ---------------------------------------------------------------------------------------------------


def launched(meeting: HostCoordinator, model: Path) -> RemoteProcess:
    """Rank 1, which finds nobody at its endpoint and waits."""
    config = RankConfig(
        model="elsewhere", dtype="auto", max_model_len=None, attention_backend="cpu", threads=1, kv_blocks=8,
        block_tokens=8, eos=(), tp=2, stages=1, kvp=1,
    )  # fmt: skip
    settings = msgspec.json.encode(config)
    assert meeting.launch(0, "ipc://nowhere", settings) is None, "node 0 runs its own"
    process = meeting.launch(1, f"tcp://127.0.0.1:{free_port()}", settings)
    assert process is not None
    return process


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_a_process_runs_ends_and_is_ended_where_node_0_wants_it(endpoint: HostEndpoint, model: Path) -> None:
    with node0(endpoint, model) as meeting:
        early = launched(meeting, model)
        assert early.is_alive(), "it starts when its host is there"
        host = Joining(endpoint, model)
        until(lambda: early.pid)
        assert early.pid is not None
        assert not readable(early.sentinel)
        os.kill(early.pid, signal.SIGKILL)
        early.join(10.0)
        assert early.ended == "(on host 1) has ended with signal 9 (SIGKILL)"
        assert readable(early.sentinel)
        again = launched(meeting, model)
        until(lambda: again.pid)
        pid = again.pid
        assert pid is not None
        assert alive(pid)
        again.kill()
        assert not again.is_alive()
        until(lambda: not alive(pid))
        last = launched(meeting, model)
        until(lambda: last.pid)
    assert host.ended() is None
    assert last.pid is not None
    assert not alive(last.pid)


def test_a_host_that_leaves_takes_its_processes_along_and_another_may_come(endpoint: HostEndpoint, model: Path) -> None:
    with node0(endpoint, model) as meeting:
        host = Joining(endpoint, model)
        process = launched(meeting, model)
        until(lambda: process.pid)
        host.leave()
        process.join(5.0)
        assert process.ended == "was on host 1, which was told to end"
        waiting = launched(meeting, model)
        Joining(endpoint, model)
        until(lambda: waiting.pid)


def test_silence_loses_a_host_on_both_sides_and_it_comes_back(
    endpoint: HostEndpoint, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the network does not carry, neither side hears: as when a cable is pulled."""
    cut = threading.Event()
    say, send = HostAgent._say, HostCoordinator._send
    monkeypatch.setattr(HostAgent, "_say", lambda self, message: not cut.is_set() and say(self, message))
    monkeypatch.setattr(HostCoordinator, "_send", lambda self, *what: None if cut.is_set() else send(self, *what))
    with node0(endpoint, model, lost_s=LOST_S) as meeting:
        host = Joining(endpoint, model)
        process = launched(meeting, model)
        until(lambda: process.pid)
        pid = process.pid
        assert pid is not None
        cut.set()
        process.join(20.0)
        assert process.ended == f"was on host 1, of which nothing was heard for {LOST_S:g} s"
        until(lambda: not alive(pid))
        cut.clear()
        again = launched(meeting, model)
        until(lambda: again.pid)
        assert host.thread.is_alive()


def test_a_new_server_at_the_same_place_finds_the_host_again(endpoint: HostEndpoint, model: Path) -> None:
    with node0(endpoint, model) as first:
        host = Joining(endpoint, model)
        process = launched(first, model)
        until(lambda: process.pid)
        pid = process.pid
        first._dismiss = lambda: None  # type: ignore[method-assign] # it is killed: nobody is told
    assert pid is not None
    with node0(endpoint, model) as second:
        again = launched(second, model)
        until(lambda: again.pid)
        assert again.pid != pid
        until(lambda: not alive(pid))
    assert host.ended() is None


def test_a_host_that_does_not_come_back_fails_what_should_run_there(endpoint: HostEndpoint, model: Path) -> None:
    with node0(endpoint, model, patience_s=0.5) as meeting:
        process = launched(meeting, model)
        process.join(5.0)
        assert process.ended == "was on host 1, which has not come back for 0.5 s"


# -- what they agree on ----------------------------------------------------------------------------------------------


@given(tp=st.integers(1, 8), stages=st.integers(1, 8), kvp=st.integers(1, 4), nodes=st.integers(1, 12))
def test_every_host_has_as_many_ranks_in_order_or_it_is_an_error(tp: int, stages: int, kvp: int, nodes: int) -> None:
    layout = ParallelLayout(tp=tp, stages=stages, kvp=kvp)
    world = layout.accelerators
    if world % nodes:
        with pytest.raises(ConfigError, match=f"--nnodes {nodes}"):
            check_nodes(nodes, layout)
        return
    check_nodes(nodes, layout)
    where = [node_of(rank, nodes, layout) for rank in range(world)]
    assert where == [node for node in range(nodes) for _ in range(world // nodes)]


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [("10.0.0.1:7", ("10.0.0.1", 7)), ("node0", ("node0", 29400)), (" a.b:65535 ", ("a.b", 65535))],
)
def test_an_endpoint_is_a_host_and_perhaps_a_port(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize("text", ["", ":7", "a:", "a:0", "a:65536", "a:x", "::1", "[::1]:7", "a:-1", "a:٣"])
def test_a_malformed_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_endpoint(text)


def test_the_loopback_is_reached_through_itself() -> None:
    assert resolve("localhost") == "127.0.0.1"
    assert address_towards("127.0.0.1") == "127.0.0.1"
    name = interface_of("127.0.0.1")
    assert name is not None
    assert Path(f"/sys/class/net/{name}").exists()
    assert interface_of("203.0.113.9") is None


def test_short_tokens_are_refused_and_made_ones_are_not() -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        check_token("secret")
    assert check_token(new_token()) != check_token(new_token())


def test_other_weights_of_the_same_shape_are_another_model(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    assert identity(copy) == identity(model)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 :] = bytes(byte ^ 1 for byte in data[len(data) // 2 :])
    weights.write_bytes(data)
    assert identity(copy) != identity(model)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        identity(tmp_path)


def test_compatibility_terms_describe_this_host(model: Path) -> None:
    mine = terms(1, 2, LAYOUT, str(model))
    assert isinstance(mine, HostHello)
    assert mine.cores == len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match="--nnodes 3"):
        terms(1, 3, LAYOUT, str(model))
