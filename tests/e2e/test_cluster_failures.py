"""Instances, and the router, that die or hang under a live cluster: streams pause, and their tokens are the same."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.helpers.cluster_probe import APART, MIXED, cluster, instances, pid_of, write
from tests.helpers.cluster_streams import (
    ANSWER_TOKENS,
    LONG_PROMPT,
    SHORT_PROMPT,
    ClientStream,
    all_ready,
    computing,
    decoding,
    handing_over,
    queued_tokens,
)
from tests.helpers.greedy_reference import GreedyReference
from tests.helpers.http_probe import metric
from tests.helpers.polling import until
from tests.helpers.process_tree import ends_soon

from headway.cli.main import main

LONG = pytest.mark.long


@pytest.fixture(scope="module")
def wanted(reference: GreedyReference) -> list[list[int]]:
    return [reference.tokens(LONG_PROMPT, ANSWER_TOKENS), reference.tokens(SHORT_PROMPT, ANSWER_TOKENS)]


@LONG
def test_a_prefill_instance_dies_computing_and_the_decode_instance_decoding(
    tmp_path: Path, llama: Path, wanted: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(tmp_path / "log")
    path = write(tmp_path, llama, "fixed-sp", {"sp": 2}, APART, event_log=log)
    with cluster(path) as running:
        url = running.url
        one, other = ClientStream(url, LONG_PROMPT), ClientStream(url, SHORT_PROMPT)
        until(lambda: queued_tokens(url, 1))
        os.kill(pid_of(url, 1), signal.SIGKILL)
        until(lambda: len(one.told) >= 20)
        os.kill(pid_of(url, 2), signal.SIGKILL)
        assert [one.answer(), other.answer()] == wanted
        until(lambda: metric(url, "headway_instance_restarts_total") == 2)
        assert httpx.get(f"{url}/health").json()["engine_restarts"] == 2
        pids = [each["pid"] for each in instances(url)]
    assert all(ends_soon(pid) for pid in pids)
    assert main(["cluster", path, "--replay", log]) == 0
    assert re.match(r"\d\d+ decisions, all as recorded", capsys.readouterr().out)


CASES = [
    ("kill a prefill instance at its run", 0, signal.SIGKILL, computing(0)),
    ("kill a prefill instance at the hand-over", 1, signal.SIGKILL, handing_over),
    ("kill the decode instance that receives", 2, signal.SIGKILL, handing_over),
    ("kill the decode instance that decodes", 2, signal.SIGKILL, decoding),
    ("stop a prefill instance at its run", 1, signal.SIGSTOP, computing(1)),
    ("stop the decode instance that receives", 2, signal.SIGSTOP, handing_over),
    ("stop the decode instance that decodes", 2, signal.SIGSTOP, decoding),
]


@LONG
@pytest.mark.parametrize(
    ("placement", "options", "pools"),
    [
        ("tetris", {}, APART),
        ("pecsched", {"long_tokens": 500}, APART),
        ("fifo", {"long_tokens": 500, "long_sp": 2}, MIXED),
    ],
)
def test_answers_survive_any_instance_that_dies_or_hangs_at_any_point(
    tmp_path: Path, llama: Path, wanted: list[list[int]], placement: str, options: object, pools: object
) -> None:
    path = write(tmp_path, llama, placement, options, pools, worker_timeout="2", max_restarts=50)
    with cluster(path) as running:
        url = running.url
        for number, (what, victim, harm, moment) in enumerate(CASES):
            until(lambda: all_ready(url))
            one, other = ClientStream(url, LONG_PROMPT), ClientStream(url, SHORT_PROMPT)
            at = moment if pools is APART else decoding
            until(lambda: at(url, one) or not one.is_alive())  # noqa: B023
            os.kill(pid_of(url, victim), harm)
            assert [one.answer(), other.answer()] == wanted, what
            until(lambda: metric(url, "headway_instance_restarts_total") == number + 1)  # noqa: B023
        until(lambda: not any(each["placed"] for each in instances(url)))
        until(lambda: not any(each["kv_tokens_used"] for each in instances(url)))


@LONG
def test_a_router_that_is_killed_leaves_its_requests_to_the_next(
    tmp_path: Path, llama: Path, reference: GreedyReference
) -> None:
    # So many that they do not all come before the router is dead.
    tokens = 600
    pools = [{"count": 1, "role": "prefill"}, {"count": 1, "role": "decode"}]
    path = write(tmp_path, llama, "tetris", {}, pools)
    journal = ("--journal", str(tmp_path / "journal"))
    body = {
        "model": llama.name, "prompt": LONG_PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "stream": True,
    }  # fmt: skip
    with cluster(path, *journal) as running:
        pids, told = [each["pid"] for each in instances(running.url)], 0
        url, headers = f"{running.url}/v1/completions", {"x-request-id": "mine"}
        with suppress(httpx.RemoteProtocolError), httpx.stream("POST", url, json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                told += line.startswith("data: ")
                if told == 50:
                    assert running._process is not None
                    running._process.kill()
                    told += 1
        assert 50 < told < tokens
        assert all(ends_soon(pid) for pid in pids)
    with cluster(path, *journal) as running:
        until(lambda: httpx.get(f"{running.url}/v1/requests/mine").status_code != 202)
        found = httpx.get(f"{running.url}/v1/requests/mine").json()
        assert found["choices"][0]["token_ids"] == reference.tokens(LONG_PROMPT, tokens)
        assert metric(running.url, "headway_decode_tokens_computed_total") < tokens - 40
