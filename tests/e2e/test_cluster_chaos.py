"""Instances, links and the router of a live cluster fail at random: no accepted request is lost, no answer changes.

A run is a seed: which requests come when, and what is done to whom at which moment (a moment of the cluster's, so that
it is met on any machine; how threads and processes run beside each other is not in the seed's hands). Runs of one
policy share a cluster, and begin while what an earlier one has hurt is still starting again. One alone:
`-k "[pecsched-3]"`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.chaos_router import processes
from tests.helpers.cluster_probe import APART, MIXED, instances, pid_of, rank_pids, write
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import model_of
from tests.helpers.polling import until
from tests.helpers.process_tree import ends_soon

from headway.cli.main import main
from headway.serving.load.convoy import ServerProcess

LENGTHS = (2400, 1500, 700, 60, 20, 3)
MOST = 160
"""Tokens of the longest answer."""
FAULTS = ("kill", "router", "cut", "stop", "slow", "stop for good")
MOMENTS = ("computing", "handing over", "some time")
ENOUGH = 20
"""Tokens of one more answer, where those of the plan have come to their end before what they were to meet."""
_PATIENCE_S = 100.0
_STALL_S = 0.6
"""A stop that is not noticed; what is to be noticed stays stopped."""
_GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}


class Cluster:
    """Routers one after the other, over one journal. `folder`: its path must be short, and only this cluster's.
    linked: whatever it serves, its instances come to speak to each other; hands_over: and KV goes from one to another
    before it is decoded. ranks: processes of an instance. harmed:
    processes under this router that were killed, or stopped for good, one of an instance's life. struck: how often
    something was done, and how often while KV moved."""

    def __init__(self, folder: Path, file: str, linked: bool, hands_over: bool, ranks: int) -> None:
        self.folder, self.file, self.linked, self._ranks = folder, file, linked, ranks
        self.hands_over = hands_over
        self.harmed: set[int] = set()
        self.struck: Counter[str] = Counter()
        self.logs: list[Path] = []
        self._there = threading.Event()
        self._given_up = False
        self.start()

    def start(self) -> None:
        """The first router, or the next."""
        control, log = (self.folder / f"{kind}{len(self.logs)}" for kind in ("control", "log"))
        self._control = control
        self.logs.append(log)
        arguments = [self.file, "--journal", str(self.folder / "journal"), "--event-log", str(log)]
        self._running = ServerProcess(arguments, command=(sys.executable, "-m", "tests.e2e.chaos_router", str(control)))
        try:
            self._running.__enter__()
        except BaseException:
            self._given_up = True
            self._there.set()
            raise
        self.model = model_of(self._running.url)
        self._there.set()

    @property
    def url(self) -> str:
        """Return the URL of the router, once one is running."""
        assert self._there.wait(100), "no router comes"
        assert not self._given_up, "no router has come"
        return self._running.url

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/v1/cluster", timeout=20).json()
        return found

    def kill_router(self) -> None:
        """And start another when nothing is left of it."""
        assert self._running._process is not None
        pids = [each["pid"] for each in instances(self.url)]
        assert self.restarts() <= len(self.harmed), "an instance was lost to which nothing was done"
        self._there.clear()
        self._running._process.kill()
        assert all(ends_soon(pid) for pid in pids), "instances stay when their router is killed"
        self._running.stop()
        self.harmed.clear()
        self.start()

    def restarts(self) -> int:
        """Under this router."""
        return sum(each["restarts_total"] for each in instances(self.url))

    def processes_of(self, number: int) -> list[int]:
        """Those of an instance that have its KV."""
        return [pid_of(self.url, number)] if self._ranks == 1 else rank_pids(self.url, number)

    def links(self, **asked: object) -> int:
        """See `chaos_router`."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
            asker.connect(str(self._control))
            with asker.makefile("rw") as lines:
                lines.write(json.dumps(asked) + "\n")
                lines.flush()
                return int(json.loads(lines.readline()))

    def quiet(self) -> bool:
        """Whether nothing is left of any request anywhere."""
        state = self.state()
        left = [
            each[what]
            for each in state["instances"]
            for what in ("placed", "running", "waiting", "kv_tokens_used", "queued_tokens")
        ]
        return not any([*left, state["requests"], state["waiting"], state["transfers"]])

    def settle(self) -> None:
        """Until it is quiet."""
        try:
            until(self.quiet)
        except AssertionError:
            raise AssertionError(f"something is left over: {json.dumps(self.state(), indent=1)}") from None

    def end(self) -> None:
        """All of it ends, and leaves no process."""
        until(lambda: self.restarts() >= len(self.harmed))
        until(lambda: all(each["state"] == "ready" for each in instances(self.url)))
        assert self.restarts() == len(self.harmed), "an instance was lost to which nothing was done"
        assert all(ends_soon(pid) for pid in self.harmed)
        self.settle()
        self._running.stop()
        until(lambda: not processes(self.folder), 10)

    def stop(self) -> None:
        """Whatever state it is in. Harmless when repeated."""
        self._running.stop()
        for pid in processes(self.folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Client(threading.Thread):
    """Sends one greedy request until it is accepted, and asks the next router for its answer where one is killed.

    told: tokens so far, of a stream that may have been cut; answer: all of them, at its end."""

    def __init__(self, cluster: Cluster, name: str, prompt: list[int], count: int, after_s: float) -> None:
        super().__init__(daemon=True)
        self._cluster, self.name, self._prompt, self.count, self._after_s = cluster, name, prompt, count, after_s
        self.told: list[int] = []
        self.answer: list[int] | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        time.sleep(self._after_s)
        try:
            while self.answer is None:
                self._ask()
        except Exception as error:
            self.error = error

    def _ask(self) -> None:
        try:
            body = {**_GREEDY, "model": self._cluster.model, "prompt": self._prompt, "max_tokens": self.count}
            url, headers = f"{self._cluster.url}/v1/completions", {"x-request-id": self.name}
            with httpx.stream("POST", url, json=body, headers=headers, timeout=100) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines():
                    self._hear(line)
            self.answer = self.told
        except httpx.HTTPStatusError as refused:
            if refused.response.status_code not in (429, 503):
                raise
            time.sleep(0.1)
        except httpx.TransportError:
            time.sleep(0.05)
            self._look_up()

    def _hear(self, line: str) -> None:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                self.told += choice.get("token_ids") or []

    def _look_up(self) -> None:
        while self.answer is None:
            try:
                found = httpx.get(f"{self._cluster.url}/v1/requests/{self.name}", timeout=20)
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if found.status_code == 404:
                assert not self.told, f"nobody knows {self.name} any more"
                return
            if found.status_code == 200:
                answer: list[int] = found.json()["choices"][0]["token_ids"]
                assert answer[: len(self.told)] == self.told, "the journal's answer is another one"
                self.answer = answer
            time.sleep(0.05)


@dataclass
class Plan:
    """What a seed says. requests: (which prompt, tokens to answer, seconds before it is sent)."""

    seed: int
    requests: list[tuple[int, int, float]] = field(default_factory=list)
    faults: list[tuple[str, str, float, int]] = field(default_factory=list)

    @classmethod
    def of(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        plan = cls(seed)
        for prompt in (0, *chance.choices(range(1, len(LENGTHS)), k=chance.randint(2, 4))):
            plan.requests.append((prompt, chance.randint(20, MOST), chance.random() * 0.3))
        kinds = [FAULTS[seed % len(FAULTS)]]
        if chance.random() < 0.5:
            kinds.append(chance.choice([kind for kind in FAULTS if kind != "router"]))
        plan.faults = [(kind, chance.choice(MOMENTS), 0.8 * chance.random(), chance.randrange(3)) for kind in kinds]
        return plan


class Run:
    """One plan carried out: its clients, and more of them while what is to be met has not come."""

    def __init__(self, cluster: Cluster, plan: Plan, prompts: Sequence[list[int]]) -> None:
        self._cluster, self._plan, self._prompts = cluster, plan, prompts
        self._asked: list[tuple[int, int]] = []
        self.clients: list[Client] = []
        for prompt, count, after_s in plan.requests:
            self._ask(prompt, count, after_s)
        self._healing: list[threading.Timer] = []

    def _ask(self, prompt: int, count: int, after_s: float = 0.0) -> None:
        self._asked.append((prompt, count))
        name = f"s{self._plan.seed}.{len(self.clients)}"
        self.clients.append(Client(self._cluster, name, self._prompts[prompt], count, after_s))

    def meets(self, moment: str, share: float) -> dict[str, Any]:
        """The cluster's state at a moment that comes: in time, or with one more long prompt."""
        total = share * sum(client.count for client in self.clients)
        reached: dict[str, Callable[[dict[str, Any]], object]] = {
            "computing": lambda state: any(each["queued_tokens"] for each in state["instances"]),
            "handing over": lambda state: state["transfers"],
            "some time": lambda state: sum(len(client.told) for client in self.clients) > total,
        }
        with self._more() as more:
            while not reached[moment](state := self._cluster.state()):
                more()
        return state

    @contextmanager
    def _more(self) -> Iterator[Callable[[], None]]:
        """To be called between two looks at what is to come: see that something is under way."""
        deadline = time.monotonic() + _PATIENCE_S

        def more() -> None:
            assert time.monotonic() < deadline, "what was to be met has not come"
            if not any(client.is_alive() for client in self.clients):
                self._ask(0, ENOUGH)
            time.sleep(0.005)

        yield more

    def strike(self, state: dict[str, Any], kind: str, moment: str, share: float, victim: int) -> str:
        """Do harm to somebody to whom none is done yet, and who has something to do; what it came upon, in words."""
        cluster = self._cluster
        cluster.struck[kind] += 1
        cluster.struck["while KV moves"] += bool(state["transfers"])
        if kind == "router":
            cluster.kill_router()
            return "the next one is there"
        if kind == "slow":
            cluster.links(slow=0.1 * share)
            self._heal(1.5, lambda: cluster.links(slow=0.0))
            return f"{share / 10:.3f} s a read"
        victims = [each for each in state["instances"] if each["state"] == "ready" and not self._harmed(each["id"])]
        work = "queued_tokens" if moment == "computing" else "placed"
        victims = [each for each in victims if each[work]] or victims
        each = victims[victim % len(victims)]
        found = f"{each['id']}, {each['placed']} placed, {each['queued_tokens']} queued, {state['transfers']} transfers"
        if kind == "cut":
            return f"{found}, {self._cut(each['id'], share)} sockets"
        pids = cluster.processes_of(each["id"])
        pid = pids[int(share * 100) % len(pids)]
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "stop":
            self._heal(_STALL_S * share, lambda: _go_on(pid))
        else:
            cluster.harmed.add(pid)
        return found

    def _harmed(self, number: int) -> bool:
        return not self._cluster.harmed.isdisjoint(self._cluster.processes_of(number))

    def _cut(self, number: int, share: float) -> int:
        """Between this one and another, if there is anything, or else between any two: how many sockets."""
        cluster = self._cluster
        with self._more() as more:
            while True:
                ids = [each["id"] for each in instances(cluster.url) if each["state"] == "ready"]
                other = (number + 1 + int(2 * share)) % 3
                pairs = sorted(combinations(ids, 2), key=lambda pair: (set(pair) != {number, other}, pair))
                for pair in pairs:
                    if hit := cluster.links(cut=[cluster.processes_of(one) for one in pair]):
                        cluster.struck["sockets"] += hit
                        return hit
                if not cluster.linked:
                    return 0
                more()

    def _heal(self, after_s: float, what: Callable[[], object]) -> None:
        self._healing.append(threading.Timer(after_s, what))
        self._healing[-1].start()

    def answers(self) -> list[list[int] | None]:
        """When all have come, and what was to go over is over."""
        for client in self.clients:
            client.join(100)
            assert client.error is None, client.error
            assert not client.is_alive(), f"{client.name} hangs after {len(client.told)} tokens"
        for timer in self._healing:
            timer.join()
        return [client.answer for client in self.clients]

    def wanted(self, wanted: Sequence[list[int]]) -> list[list[int]]:
        return [wanted[prompt][:count] for prompt, count in self._asked]


def go(cluster: Cluster, plan: Plan, prompts: Sequence[list[int]], wanted: Sequence[list[int]]) -> None:
    """One run: all requests, with their faults, checked."""
    run = Run(cluster, plan, prompts)
    for kind, moment, share, victim in plan.faults:
        if moment == "handing over" and not cluster.hands_over:
            moment = "computing"
        if moment == "handing over":  # which would be over in milliseconds
            cluster.links(slow=0.02)
        state = run.meets(moment, share)
        left = sum(client.is_alive() for client in run.clients)
        print(f"{kind}, {moment}, {left} under way: {run.strike(state, kind, moment, share, victim)}")
        if moment == "handing over" and kind != "slow":
            cluster.links(slow=0.0)
    answers = run.answers()
    cluster.settle()
    assert answers == run.wanted(wanted)


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


SHORT = {"long_tokens": 500, "long_sp": 2}
RINGS = {**SHORT, "long_replicas": "fixed"}
IN_PLACE = {"group_decode": "in-place", "kv_cache_memory": "1M"}
TWO = {"tensor_parallel_size": 2}
CLUSTERS: dict[str, tuple[str, object, object]] = {
    "pecsched": ("pecsched", RINGS, APART),
    "tetris": ("tetris", {}, APART),
    "ladder": ("ladder", {}, APART),
    "fixed-sp": ("fixed-sp", {"sp": 2}, APART),
    "loongserve": ("loongserve", {}, APART),
    "pecsched-mixed": ("pecsched", {**RINGS, "disaggregate": False}, MIXED),
    "loongserve-mixed": ("loongserve", {}, MIXED),
    "fifo-mixed": ("fifo", SHORT, MIXED),
    "jsq-mixed": ("jsq", {}, MIXED),
    "tetris-ranks": ("tetris", {"sizes": [1, 2]}, APART),
    "pecsched-ranks": ("pecsched", RINGS, APART),
    "loongserve-in-place": ("loongserve", {"decode_batch": 1}, MIXED),
}
ALONE = ("loongserve-mixed", "jsq-mixed")
"""Where an instance may do all that there is to do alone."""
NAMES = list(CLUSTERS)
TURNS = 3


PROMPTS = [prompt_of(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def wanted(reference: GreedyReference) -> list[list[int]]:
    return [reference.tokens(prompt, MOST) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, llama: Path) -> Iterator[Cluster]:
    placement, options, pools = CLUSTERS[request.param]
    folder = Path(tempfile.mkdtemp(prefix="hw-chaos-"))
    ranks, in_place = request.param.endswith("-ranks"), request.param.endswith("-in-place")
    settings = {**(TWO if ranks else {}), **(IN_PLACE if in_place else {})}
    file = write(folder, llama, placement, options, pools, worker_timeout="3", max_restarts=100, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        linked = request.param not in ALONE
        running = Cluster(folder, file, linked, hands_over=linked and not in_place, ranks=2 if ranks else 1)
        try:
            yield running
            running.end()
            print(running.struck)
            assert running.struck["sockets"] >= running.struck["cut"] or not running.linked
            for log in running.logs:
                assert main(["cluster", file, "--replay", str(log)]) == 0, "its log is decided otherwise"
        finally:
            running.stop()
            shutil.rmtree(folder, ignore_errors=True)


CASES = [
    pytest.param(
        name,
        turn,
        marks=[pytest.mark.xdist_group(name), pytest.mark.long],
        id=f"{name}-{turn}",
    )
    for name in NAMES
    for turn in range(TURNS)
]


@pytest.mark.parametrize(("cluster", "turn"), CASES, indirect=["cluster"])
def test_nothing_is_lost_and_no_answer_changes(
    cluster: Cluster, turn: int, wanted: list[list[int]], request: pytest.FixtureRequest
) -> None:
    plan = Plan.of(TURNS * NAMES.index(request.node.callspec.params["cluster"]) + turn)
    print(plan)
    go(cluster, plan, PROMPTS, wanted)
