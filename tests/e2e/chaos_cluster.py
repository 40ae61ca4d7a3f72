"""A live cluster that is hurt on purpose, its clients, and a seed's plan of what happens when."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaos_router
import httpx
from chaos_links import processes
from cluster_probe import instances, until
from http_probe import model_of
from test_serving_failures import gone

from headway.bench.server_process import ServerProcess

LENGTHS = (2400, 1500, 700, 60, 20, 3)
MOST = 160
"""Tokens of the longest answer."""
FAULTS = ("kill", "router", "cut", "stop", "slow", "stop for good")
MOMENTS = ("computing", "handing over", "some time")
_PATIENCE_S = 2.0
_GREEDY = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}


class Cluster:
    """Routers one after the other, over one journal. `folder`: its path must be short, and only this cluster's."""

    def __init__(self, folder: Path, file: str) -> None:
        self.folder, self.file = folder, file
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
        self._running = ServerProcess(arguments, command=(sys.executable, chaos_router.__file__, str(control)))
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
        """Of the router that is there; waits for it."""
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
        self._there.clear()
        self._running._process.kill()
        assert all(gone(pid) for pid in pids), "instances stay when their router is killed"
        self._running.stop()
        self.start()

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
        until(lambda: all(each["state"] == "ready" for each in instances(self.url)))
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


def go(cluster: Cluster, plan: Plan, prompts: Sequence[list[int]], wanted: Sequence[list[int]]) -> None:
    """One run: all requests, with their faults, checked."""
    if any(moment == "handing over" for _, moment, _, _ in plan.faults):  # which would be over in milliseconds
        cluster.links(slow=0.02)
    clients = [
        Client(cluster, f"s{plan.seed}.{i}", prompts[prompt], count, after_s)
        for i, (prompt, count, after_s) in enumerate(plan.requests)
    ]
    healing: list[threading.Timer] = []
    for fault in plan.faults:
        kind, moment, share, _ = fault
        state = _await(cluster, clients, moment, share)
        left = sum(client.is_alive() for client in clients)
        print(f"{kind}, {moment}, {left} under way: {_strike(cluster, state, fault, healing)}")
    for client in clients:
        client.join(100)
        assert client.error is None, client.error
        assert not client.is_alive(), f"{client.name} hangs after {len(client.told)} tokens"
    for timer in healing:
        timer.join()
    cluster.links(slow=0.0)
    cluster.settle()
    answers = [client.answer for client in clients]
    assert answers == [wanted[prompt][:count] for prompt, count, _ in plan.requests]


def _await(cluster: Cluster, clients: Sequence[Client], moment: str, share: float) -> dict[str, Any]:
    """Wait for a moment, or for a share of all answers at the latest; the cluster's state then."""
    reached: dict[str, Callable[[dict[str, Any]], object]] = {
        "computing": lambda state: any(each["queued_tokens"] for each in state["instances"]),
        "handing over": lambda state: state["transfers"],
        "some time": lambda state: False,
    }
    latest = (share if moment == "some time" else 0.8) * sum(client.count for client in clients)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        state = cluster.state()
        told = sum(len(client.told) for client in clients)
        if reached[moment](state) or told > latest or time.monotonic() > deadline:
            return state
        time.sleep(0.005)


def _strike(
    cluster: Cluster, state: dict[str, Any], fault: tuple[str, str, float, int], healing: list[threading.Timer]
) -> str:
    """Do harm; what it came upon, in words. Who is hurt while there is computing is one of those who compute."""
    kind, moment, share, victim = fault
    if kind == "router":
        cluster.kill_router()
        return "the next one is there"
    computing = [number for number, each in enumerate(state["instances"]) if each["queued_tokens"]]
    if moment == "computing" and computing:
        victim = computing[victim % len(computing)]
    each, other = state["instances"][victim], state["instances"][(victim + 1 + int(2 * share)) % 3]
    pid = each["pid"]
    found = f"{victim} {each['state']}, {each['placed']} placed, {each['queued_tokens']} queued, "
    found += f"{state['transfers']} transfers"
    if kind == "cut":
        return f"{found}, {cluster.links(cut=[pid, other['pid']])} sockets"
    if kind == "slow":
        cluster.links(slow=0.1 * share)
        healing.append(threading.Timer(1.5, cluster.links, kwargs={"slow": 0.0}))
    elif kind == "stop" or each["state"] != "ready":
        _signal(pid, signal.SIGSTOP)
        healing.append(threading.Timer(1.5 * share, _signal, (pid, signal.SIGCONT)))
    else:
        _signal(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return found
    healing[-1].start()
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
