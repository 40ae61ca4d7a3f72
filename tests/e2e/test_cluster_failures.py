"""Instances, and the router, that die or hang under a live cluster: streams pause, and their tokens are the same."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.helpers.cluster_probe import APART, cluster, instances, pid_of, write
from tests.helpers.cluster_streams import (
    ANSWER_TOKENS,
    LONG_PROMPT,
    SHORT_PROMPT,
    ClientStream,
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
