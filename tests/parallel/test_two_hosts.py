"""Two network namespaces as two hosts, nodes of Ray, and the launch of docs/how-to/several-hosts.md."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.greedy_reference import prompt_of
from tests.helpers.namespaces import RAY_ADDRESS, Hosts, RayOnHosts, Running, ray_on
from tests.helpers.polling import until
from tests.helpers.process_tree import ends_soon
from tests.parallel.rank_serving import greedy

HEADWAY = (sys.executable, "-m", "headway.cli.main")
PORT = 8000
pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.xdist_group("ray")]
ASKS = [(prompt_of(1, 180), 8), (prompt_of(2, 3), 12)]

REQUEST = """
import json, sys, urllib.request
body = sys.stdin.buffer.read()
request = urllib.request.Request(sys.argv[1], body or None, {"content-type": "application/json"})
try:
    answer = urllib.request.urlopen(request, timeout=60)
except urllib.error.HTTPError as error:
    answer = error
sys.stdout.buffer.write(answer.read())
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=3, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def ray(hosts: Hosts) -> Iterator[RayOnHosts]:
    with ray_on(hosts) as made:
        yield made


@contextmanager
def serving(hosts: Hosts, ray: RayOnHosts, model: Path, *sizes: str) -> Iterator[Running]:
    flags = [str(model), *sizes, "--nnodes", "2", "--ray-address", RAY_ADDRESS]
    own = ["--port", str(PORT), "--latency-profile", "quick", "--kv-cache-memory", "4M"]
    server = Running(hosts.a, *HEADWAY, "serve", *flags, *own, variables=ray.variables)
    try:
        until(lambda: ready(hosts, server), 120.0)
        yield server
    finally:
        server.remove()


def ready(hosts: Hosts, server: Running) -> bool:
    assert server.process.poll() is None, server.said
    return "Uvicorn running" in server.said and get(hosts, "/health").get("status") == "ready"


def get(hosts: Hosts, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the server says to a client on its own host."""
    answer: dict[str, Any] = json.loads(fetch(hosts, path, body))
    return answer


def fetch(hosts: Hosts, path: str, body: dict[str, Any] | None = None) -> bytes:
    done = subprocess.run(
        ["ip", "netns", "exec", hosts.a, sys.executable, "-c", REQUEST, f"http://127.0.0.1:{PORT}{path}"],
        input=b"" if body is None else json.dumps(body).encode(),
        capture_output=True,
        check=True,
    )
    return done.stdout


def tokens(hosts: Hosts, model: Path, prompt: list[int], count: int) -> list[int]:
    body = {"model": model.name, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = get(hosts, "/v1/completions", {**body, "return_token_ids": True})
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_stages_on_two_hosts_answer_as_one_process(hosts: Hosts, ray: RayOnHosts, llama: Path) -> None:
    with serving(hosts, ray, llama, "--pipeline-parallel-size", "2") as server:
        for prompt, count in ASKS:
            assert tokens(hosts, llama, prompt, count) == greedy(llama, prompt, count)
        (worker,) = workers(hosts)
        server.terminate()
        assert server.ended(30.0) == 0, server.said
        assert ends_soon(worker, 30.0)


def workers(hosts: Hosts) -> list[int]:
    """The processes of ranks on host 1."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in hosts.pids(hosts.b)}
    return [pid for pid, line in lines.items() if b"headway.runtime.executor.rank_process" in line]


def prefilled(hosts: Hosts) -> float:
    """Prompt tokens computed so far, also those that were computed before."""
    found = re.search(
        r"^headway_prefill_tokens_computed_total(?:{.*})? (\S+)$", fetch(hosts, "/metrics").decode(), re.MULTILINE
    )
    assert found is not None
    return float(found[1])


def test_heads_on_two_hosts_through_a_killed_worker_and_a_pulled_cable(
    hosts: Hosts, ray: RayOnHosts, llama: Path
) -> None:
    """A long prompt in the midst of its prefill and chats in the midst of their answers, each time."""
    asks = [(prompt_of(1, 1800), 8), (prompt_of(2, 20), 300), (prompt_of(3, 9), 280)]
    wanted = [greedy(llama, *ask) for ask in asks]
    slowly = ("--chunking", "static:8", "--t-target-ms", "1000")
    with (
        serving(hosts, ray, llama, "--tensor-parallel-size", "2", *slowly) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        answers = [pool.submit(tokens, hosts, llama, *ask) for ask in asks]
        until(lambda: prefilled(hosts) > 100, 20.0)
        (worker,) = workers(hosts)
        os.kill(worker, signal.SIGKILL)
        until(lambda: get(hosts, "/health").get("recoveries") == 1, 5.0)  # whoever told of it first
        again = {"status": "ready", "recoveries": 1, "engine_restarts": 0}
        until(lambda: get(hosts, "/health") == again, 20.0)
        begun = prefilled(hosts)
        until(lambda: prefilled(hosts) > begun + 100, 20.0)
        assert not any(answer.done() for answer in answers), "all of them are in the midst of it"
        hosts.cable("down")
        into_the_cut = pool.submit(tokens, hosts, llama, *ASKS[0])
        until(lambda: get(hosts, "/health")["status"] != "ready", 20.0)
        assert re.search(r"sent no heartbeat for 10 s|nothing was heard for 10 s", server.said), server.said
        assert not any(answer.done() for answer in (*answers, into_the_cut))
        hosts.cable("up")
        assert [answer.result() for answer in answers] == wanted
        assert into_the_cut.result() == greedy(llama, *ASKS[0]), "it waited, and knows nothing of it"
        assert get(hosts, "/health") == {**again, "recoveries": 2}
        server.terminate()
        assert server.ended(30.0) == 0, server.said
