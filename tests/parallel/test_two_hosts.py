"""Two network namespaces as two hosts, a virtual cable between them, and the launch of docs/how-to/several-hosts.md."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.namespaces import Hosts, Running
from tests.helpers.polling import until
from tests.helpers.rank_serving import greedy, prompt_of

HEADWAY = (sys.executable, "-m", "headway.cli.main")
PORT = 8000
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


@contextmanager
def serving(hosts: Hosts, model: Path, *sizes: str) -> Iterator[tuple[Running, Running]]:
    """As docs/how-to/several-hosts.md has it: the same command on both hosts, but for --node-rank."""
    flags = [str(model), *sizes, "--nnodes", "2", "--rdzv-endpoint", "10.77.0.1:29400"]
    own = ["--port", str(PORT), "--latency-profile", "quick", "--kv-cache-memory", "4M"]
    with ExitStack() as stack:
        pair = []
        for rank, namespace in enumerate((hosts.a, hosts.b)):
            one = Running(namespace, *HEADWAY, "serve", *flags, "--node-rank", str(rank), *own)
            stack.callback(one.remove)
            pair.append(one)
        server, host = pair
        until(lambda: ready(hosts, server, host), 90.0)
        yield server, host


def ready(hosts: Hosts, *running: Running) -> bool:
    for one in running:
        assert one.process.poll() is None, one.said
    return "Uvicorn running" in running[0].said and get(hosts, "/health").get("status") == "ready"


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


def test_stages_on_two_hosts_answer_as_one_process(hosts: Hosts, llama: Path) -> None:
    with serving(hosts, llama, "--pipeline-parallel-size", "2") as (server, host):
        for prompt, count in ASKS:
            assert tokens(hosts, llama, prompt, count) == greedy(llama, prompt, count)
        server.terminate()
        assert (server.ended(), host.ended()) == (0, 0)
        assert "node 0 has ended" in host.said


def workers(agent: Running) -> list[int]:
    """The processes of ranks under a host's agent: its helpers' children."""

    def children(pid: int) -> list[int]:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    return [worker for helper in children(agent.process.pid) for worker in children(helper)]


def prefilled(hosts: Hosts) -> float:
    """Prompt tokens computed so far, also those that were computed before."""
    found = re.search(
        r"^headway_prefill_tokens_computed_total(?:{.*})? (\S+)$", fetch(hosts, "/metrics").decode(), re.MULTILINE
    )
    assert found is not None
    return float(found[1])


@pytest.mark.long
def test_heads_on_two_hosts_through_a_killed_worker_and_a_pulled_cable(hosts: Hosts, llama: Path) -> None:
    """A long prompt in the midst of its prefill and chats in the midst of their answers, each time."""
    asks = [(prompt_of(1, 1800), 8), (prompt_of(2, 20), 300), (prompt_of(3, 9), 280)]
    wanted = [greedy(llama, *ask) for ask in asks]
    slowly = ("--chunking", "static:8", "--t-target-ms", "1000")
    with (
        serving(hosts, llama, "--tensor-parallel-size", "2", *slowly) as (server, host),
        ThreadPoolExecutor(4) as pool,
    ):
        answers = [pool.submit(tokens, hosts, llama, *ask) for ask in asks]
        until(lambda: prefilled(hosts) > 100, 20.0)
        (worker,) = workers(host)
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
        until(lambda: "ending its workers" in host.said, 10.0)
        assert not any(answer.done() for answer in (*answers, into_the_cut))
        hosts.cable("up")
        assert [answer.result() for answer in answers] == wanted
        assert into_the_cut.result() == greedy(llama, *ASKS[0]), "it waited, and knows nothing of it"
        assert get(hosts, "/health") == {**again, "recoveries": 2}
        server.terminate()
        assert (server.ended(), host.ended()) == (0, 0)
