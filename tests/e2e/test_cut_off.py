"""Real servers and clusters that end before their answers are whole, and the loss of a worker in their logs."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.cluster_probe import cluster, pid_of, rank_pids, write
from tests.helpers.greedy_reference import prompt_of
from tests.helpers.http_probe import metric_reaches, model_of
from tests.helpers.polling import until

from headway.serving.load.convoy import ServerProcess

pytestmark = pytest.mark.long


class Client(threading.Thread):
    """One request in a thread of its own."""

    def __init__(self, url: str, stream: bool) -> None:
        super().__init__()
        self.url, self.stream = url, stream
        self.model = model_of(url)
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        body = {"model": self.model, "prompt": prompt_of(3, 50), "max_tokens": 4000, "ignore_eos": True}
        self.answer = httpx.post(f"{self.url}/v1/completions", json={**body, "stream": self.stream}, timeout=100)

    def got(self) -> httpx.Response:
        self.join(100)
        assert self.answer is not None
        return self.answer


def lines_of(server: ServerProcess) -> list[dict[str, Any]]:
    """All that it has logged, every line of which must be an object."""
    return [json.loads(line) for line in os.pread(server._log.fileno(), 1 << 20, 0).splitlines()]


def served(kind: str, folder: Path, model: Path, **serve: object) -> ServerProcess:
    """`headway serve`, or `headway cluster` of one prefill and one decode instance."""
    settings = {"kv_cache_memory": "16M", "latency_profile": "quick", "threads": 1, "log_format": "json", **serve}
    if kind == "cluster":
        pools = [{"count": 1, "role": "prefill"}, {"count": 1, "role": "decode"}]
        return cluster(write(folder, model, "pecsched", {"long_replicas": "fixed", "long_sp": 1}, pools, **settings))
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ServerProcess([str(model), *words])


@pytest.mark.parametrize("kind", ["serve", "cluster"])
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]], ids=["drain", "second"])
def test_all_waiting_clients_get_an_error(
    kind: str, signals: list[signal.Signals], llama: Path, tmp_path: Path
) -> None:
    with served(kind, tmp_path, llama, drain_timeout_s=0.3 if len(signals) == 1 else 100) as server:
        clients = [Client(server.url, stream) for stream in (False, False, True)]
        metric_reaches(server.url, "headway_num_requests_running", lambda value: value >= 3)
        assert server._process is not None
        for number in signals:
            server._process.send_signal(number)
        for client in clients[:2]:
            answer = client.got()
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        answer = clients[2].got()
        assert answer.status_code == 200
        last = json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == 503
        assert server._process.wait(30) == 0
        assert not any("exception" in line for line in lines_of(server))


def test_the_loss_of_a_worker_is_a_few_lines_without_a_trace(llama: Path, tmp_path: Path) -> None:
    pools = [{"count": 1, "serve": {"tensor_parallel_size": 2}}]
    path = write(tmp_path, llama, "jsq", {}, pools, log_format="json", kv_cache_memory="16M")
    with cluster(path) as server:
        first = pid_of(server.url, 0)
        worker = rank_pids(server.url, 0)[0]
        os.kill(worker, signal.SIGKILL)
        until(lambda: pid_of(server.url, 0) not in (0, first))
        lines = lines_of(server)
        (lost,) = (line for line in lines if line["message"].startswith("this engine ends: worker "))
        assert (lost["level"], lost["instance"]) == ("warning", 0)
        assert not any("exception" in line for line in lines)
