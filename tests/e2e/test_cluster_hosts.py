"""A cluster on two hosts (network namespaces): the launch of docs/how-to/cluster.md, and what may go wrong there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.cluster_probe import APART, CLUSTER, instances, pid_of, write
from tests.helpers.cluster_streams import ANSWER_TOKENS, ClientStream, decoding, handing_over
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import metric, streamed_ids
from tests.helpers.namespaces import NODE0, Hosts, Running, inside
from tests.helpers.polling import until
from tests.helpers.process_tree import ends_soon

from headway.cli.main import main

PROMPT = prompt_of(5, 3000)
OTHER = prompt_of(6, 300)
SPLIT = [{"count": 1, "role": "prefill"}, {"count": 1, "role": "decode", "host": 1}]
URL = "http://127.0.0.1:8000"
SLOW_MBIT_S = 4
"""What a long prompt's KV takes seconds for."""
LONG = pytest.mark.long


@pytest.fixture(scope="module")
def wanted(reference: GreedyReference) -> list[list[int]]:
    return [reference.tokens(PROMPT, ANSWER_TOKENS), reference.tokens(OTHER, ANSWER_TOKENS)]


class Pair:
    """The command on both hosts, but for --node-rank."""

    def __init__(self, hosts: Hosts, path: str, stack: ExitStack, *flags: str) -> None:
        self._hosts, self._stack = hosts, stack
        self._words = *CLUSTER, path, "--nnodes", "2", "--rdzv-endpoint", f"{NODE0}:29400", *flags
        self.agent = self.start(1)
        self.head = self.start(0)

    def start(self, rank: int, **more: Any) -> Running:
        namespace = self._hosts.b if rank else self._hosts.a
        one = Running(namespace, *self._words, "--node-rank", str(rank), **more)
        self._stack.callback(one.remove)
        return one


def ready() -> bool:
    try:
        return httpx.get(f"{URL}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def states() -> list[str]:
    return [each["state"] for each in instances(URL)]


def all_ready() -> bool:
    return set(states()) == {"ready"}


@contextmanager
def clustered(hosts: Hosts, path: str, *flags: str) -> Iterator[Pair]:
    with ExitStack() as stack:
        pair = Pair(hosts, path, stack, *flags)
        stack.enter_context(inside(hosts.a))

        def up() -> bool:
            for one in (pair.head, pair.agent):
                assert one.process.poll() is None, one.said
            return ready()

        until(up, 90.0)
        yield pair


@LONG
def test_prefill_here_and_decode_there_through_a_killed_agent_and_a_pulled_cable(
    hosts: Hosts, tmp_path: Path, llama: Path, wanted: list[list[int]]
) -> None:
    """Each in the midst of a hand-over. What was decided replays."""
    log = str(tmp_path / "log")
    path = write(tmp_path, llama, "fixed-sp", {"sp": 1}, SPLIT, event_log=log)
    with clustered(hosts, path) as pair:
        assert [(each["host"], each["node"]) for each in instances(URL)] == [(0, 0), (1, 1)]
        assert [streamed_ids(URL, each, ANSWER_TOKENS, ignore_eos=True) for each in (PROMPT, OTHER)] == wanted
        for number in (0, 1):  # though it is one machine: what is between hosts goes over the cable
            assert "headway-kv" not in Path(f"/proc/{pid_of(URL, number)}/maps").read_text()

        with hosts.slow(SLOW_MBIT_S):
            one, other = ClientStream(URL, PROMPT), ClientStream(URL, OTHER)
            until(lambda: handing_over(URL, one))
            engine = pid_of(URL, 1)
            pair.agent.process.kill()
            until(lambda: ends_soon(engine), 5.0)
        until(lambda: states() == ["ready", "lost"], 10.0)
        pair.agent = pair.start(1)
        assert [one.answer(), other.answer()] == wanted
        until(all_ready)

        with hosts.slow(SLOW_MBIT_S):
            other, one = ClientStream(URL, OTHER), ClientStream(URL, PROMPT)
            until(lambda: handing_over(URL, one))
            hosts.cable("down")
        until(lambda: states() == ["ready", "lost"], 20.0)
        until(lambda: "ending its instances" in pair.agent.said, 10.0)
        hosts.cable("up")
        assert [one.answer(), other.answer()] == wanted
        until(all_ready)
        assert metric(URL, "headway_instance_restarts_total") == 2, "one for each loss"
        pair.head.terminate()
        assert (pair.head.ended(), pair.agent.ended()) == (0, 0)
        assert "node 0 has ended" in pair.agent.said
    assert main(["cluster", path, "--replay", log]) == 0


@LONG
def test_an_instance_there_is_killed_decoding(
    hosts: Hosts, tmp_path: Path, llama: Path, wanted: list[list[int]]
) -> None:
    path = write(tmp_path, llama, "fixed-sp", {"sp": 1}, SPLIT)
    with clustered(hosts, path) as pair:
        one = ClientStream(URL, PROMPT)
        until(lambda: decoding(URL, one))
        os.kill(pid_of(URL, 1), signal.SIGKILL)
        until(lambda: "(on host 1) has ended with signal 9 (SIGKILL)" in pair.head.said, 5.0)
        assert one.answer() == wanted[0]
        until(all_ready)


@LONG
def test_an_instance_that_cannot_start_is_reported_on_both_hosts(hosts: Hosts, tmp_path: Path, llama: Path) -> None:
    """A model that is missing there, another token, and a host that never comes."""
    path = write(tmp_path, llama, "fixed-sp", {"sp": 1}, SPLIT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "cluster.yaml").write_text(Path(path).read_text())
    flags = "--nnodes", "2", "--rdzv-endpoint", f"{NODE0}:29400", "--rdzv-timeout", "6"
    with ExitStack() as stack:
        head = Running(hosts.a, *CLUSTER, path, *flags)
        bare = Running(hosts.b, *CLUSTER, str(elsewhere / "cluster.yaml"), *flags, "--node-rank", "1")
        other = Running(hosts.b, *CLUSTER, path, *flags, "--node-rank", "1", token="another-token-of-tests")
        for each in (head, bare, other):
            stack.callback(each.remove)
        assert (bare.ended(15), other.ended(15), head.ended(15)) == (2, 2, 2)
        assert "node 0 refuses this host: " in bare.said
        assert "config.json" in bare.said
        assert "does not take this host's token" in other.said
        assert "no host came with --node-rank 1 within 6 s; host 1 was refused: " in head.said
        assert "config.json" in head.said.splitlines()[-1]


MORE: list[tuple[str, str, str, object, Any]] = [
    ("a ring over both hosts", "cut", "fixed-sp", {"sp": 2}, [{"count": 1}, {"count": 1, "host": 1}]),
    (
        "prefill there, decode here",
        "stop",
        "tetris",
        {},
        [{"role": "decode"}, {"count": 2, "role": "prefill", "host": 1}],
    ),
    ("all of it there", "cut", "pecsched", {"long_tokens": 500}, [{**pool, "host": 1} for pool in APART]),
]
"""Where instances are, what is done to those on the other host (a stopped one, a cut cable), and under which policy."""


@LONG
@pytest.mark.parametrize(
    ("harm", "placement", "options", "pools"), [case[1:] for case in MORE], ids=[case[0] for case in MORE]
)
def test_a_stopped_instance_or_a_cut_cable_changes_no_answer_in_other_places(
    hosts: Hosts,
    tmp_path: Path,
    llama: Path,
    wanted: list[list[int]],
    harm: str,
    placement: str,
    options: object,
    pools: Any,
) -> None:
    path = write(tmp_path, llama, placement, options, pools)
    with clustered(hosts, path) as pair:
        one, other = ClientStream(URL, PROMPT), ClientStream(URL, OTHER)
        until(lambda: len(other.told) > 5)
        if harm == "stop":
            os.kill(pid_of(URL, len(instances(URL)) - 1), signal.SIGSTOP)
            until(lambda: "lost" in states(), 20.0)
        else:
            hosts.cable("down")
            until(lambda: "lost" in states(), 20.0)
            hosts.cable("up")
        assert [one.answer(), other.answer()] == wanted
        until(all_ready)
        pair.head.terminate()
        assert (pair.head.ended(), pair.agent.ended()) == (0, 0)


@LONG
def test_a_short_cut_is_a_pause_and_a_new_router_finds_its_hosts(
    hosts: Hosts, tmp_path: Path, llama: Path, wanted: list[list[int]]
) -> None:
    path = write(tmp_path, llama, "fixed-sp", {"sp": 1}, SPLIT)
    with clustered(hosts, path, "--journal", str(tmp_path / "journal")) as pair:
        one = ClientStream(URL, PROMPT)
        until(lambda: decoding(URL, one))
        hosts.cable("down")
        time.sleep(1.0)
        hosts.cable("up")
        assert one.answer() == wanted[0]
        assert metric(URL, "headway_instance_restarts_total") == 0
        engine = pid_of(URL, 1)
        pair.head.process.kill()
        pair.head.ended()
        pair.head = pair.start(0)
        until(ready, 60.0)
        until(lambda: ends_soon(engine), 15.0)
        assert streamed_ids(URL, OTHER, ANSWER_TOKENS, ignore_eos=True) == wanted[1]


@LONG
def test_a_dry_run_lists_the_instances_of_each_host(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, llama, "fixed-sp", {"sp": 1}, SPLIT)
    assert main(["cluster", path, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "pool 0: 1 x prefill, on host 0, 1 threads each\nmodel " in said
    assert "pool 1: 1 x decode, on host 1, 1 threads each\n  loaded on this host; " in said
    assert "predicted capacity" in said
    assert said.count("prompt of this length") == 1  # a decode pool gets none
    assert main(["cluster", path, "--dry-run", "--nnodes", "2", "--node-rank", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("KV cache ") == 1
    assert "pool 1: 1 x decode, on host 1, 1 threads each\nmodel " in said
    assert "predicted capacity" not in said
