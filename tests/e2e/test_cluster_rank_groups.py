"""Groups of instances that are several processes each, under the policies that make them: answers, pauses, losses."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.cluster_probe import cluster, instances, rank_pids, write
from tests.helpers.cluster_streams import (
    ANSWER_TOKENS,
    LONG_PROMPT,
    SHORT_PROMPT,
    ClientStream,
    decoding,
    handing_over,
    queued_tokens,
)
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import leave_after_sending, metric, metric_reaches, streamed_ids
from tests.helpers.polling import until
from tests.helpers.process_tree import ends_soon

from headway.cli.main import main

LONG = pytest.mark.long
PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((1500, 20, 3, 700, 60, 333, 1900, 100))]
TWO = {"tensor_parallel_size": 2}
SHORT = {"long_tokens": 500}
GROUPS = {**SHORT, "long_sp": 2, "long_replicas": "fixed"}
"""All long prompts on two instances."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("rank-groups-llama"), max_position_embeddings=16384)


@pytest.fixture(scope="module")
def reference(llama: Path) -> GreedyReference:
    return GreedyReference(llama)


def apart(decode: int = 1, **prefill: Any) -> list[dict[str, Any]]:
    return [
        {"count": 2, "role": "prefill", "serve": {**TWO, **prefill}},
        {"count": 1, "role": "decode", "serve": {"tensor_parallel_size": decode}},
    ]


MIXED = [{"count": 2, "serve": TWO}]


@LONG
@pytest.mark.parametrize(
    ("placement", "options", "pools"),
    [
        ("tetris", {"sizes": [1, 2]}, apart(2, tensor_parallel_size=4)),
        ("pecsched", GROUPS, apart()),
        ("ladder", {}, apart(4)),
        ("tetris", {"sizes": [1, 2]}, MIXED),
        ("pecsched in-place", {**GROUPS, "disaggregate": False}, MIXED),
        ("loongserve in-place", {}, MIXED),
    ],
)
def test_greedy_tokens_equal_transformers(
    tmp_path: Path,
    llama: Path,
    reference: GreedyReference,
    placement: str,
    options: object,
    pools: list[dict[str, Any]],
) -> None:
    """Long and short requests at once; one that leaves; nothing stays, and decisions replay."""
    name, _, decode = placement.partition(" ")
    log = str(tmp_path / "log")
    path = write(tmp_path, llama, name, options, pools, decode or "gather", event_log=log)
    with cluster(path) as running:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            got = list(pool.map(lambda prompt: streamed_ids(running.url, prompt, 20, ignore_eos=True), PROMPTS))
        assert got == [reference.tokens(prompt, 20) for prompt in PROMPTS]
        leave_after_sending(running.url, prompt_of(9, 3500), 500)
        metric_reaches(running.url, "headway_instance_requests_placed", lambda placed: placed == 0)
        metric_reaches(running.url, "headway_instance_kv_tokens_used", lambda used: used == 0)
        assert metric(running.url, "headway_instance_restarts_total") == 0
    assert main(["cluster", path, "--replay", log]) == 0


@LONG
def test_chats_go_before_a_prompt_that_pauses_within_itself(
    tmp_path: Path, llama: Path, reference: GreedyReference
) -> None:
    """PecSched: a long prompt on two instances of two processes is paused for short ones, between layers."""
    log = tmp_path / "log"
    path = write(tmp_path, llama, "pecsched", {**GROUPS, "long_tokens": 1000}, apart(), event_log=str(log))
    chats = [prompt_of(seed, 90) for seed in range(2, 6)]
    expected = [reference.tokens(prompt, 5) for prompt in chats]
    with cluster(path) as running, ThreadPoolExecutor(8) as pool:
        url = running.url
        streamed_ids(url, prompt_of(7, 50), 2, ignore_eos=True)
        for seed in range(10, 20):  # until chats have come in time
            long = prompt_of(seed, 8000)
            first = pool.submit(streamed_ids, url, long, 5, ignore_eos=True)
            until(lambda first=first: any(queued_tokens(url, number) for number in (0, 1)) or first.done())  # type: ignore[misc]
            got = list(pool.map(lambda prompt: streamed_ids(url, prompt, 5, ignore_eos=True), chats))
            assert got == expected
            assert first.result() == reference.tokens(long, 5)
            if b'"SpanPaused"' in log.read_bytes():
                break
    assert b'"SpanPaused"' in log.read_bytes()
    assert main(["cluster", path, "--replay", str(log)]) == 0


@LONG
@pytest.mark.parametrize(
    ("placement", "options"),
    [
        ("tetris", {"sizes": [2]}),
        ("pecsched", {**GROUPS, "long_tokens": 200}),
    ],
)
def test_a_rank_of_a_group_that_dies_in_a_span_changes_no_answer(
    tmp_path: Path,
    llama: Path,
    reference: GreedyReference,
    capsys: pytest.CaptureFixture[str],
    placement: str,
    options: object,
) -> None:
    wanted = [reference.tokens(prompt, ANSWER_TOKENS) for prompt in (LONG_PROMPT, SHORT_PROMPT)]
    log = str(tmp_path / "log")
    path = write(tmp_path, llama, placement, options, apart(), event_log=log, worker_timeout="2")
    with cluster(path) as running:
        url = running.url
        before = [*rank_pids(url, 0), *rank_pids(url, 1)]
        assert len(before) == 4
        one, other = ClientStream(url, LONG_PROMPT), ClientStream(url, SHORT_PROMPT)
        until(lambda: queued_tokens(url, 1) or one.told)  # the latter where it was too quick to be seen
        os.kill(rank_pids(url, 1)[1], signal.SIGKILL)
        assert [one.answer(), other.answer()] == wanted
        until(lambda: metric(url, "headway_instance_restarts_total") == 1)
        until(lambda: not any(each["placed"] or each["kv_tokens_used"] for each in instances(url)))
        assert sum(map(ends_soon, before)) == 2
    assert main(["cluster", path, "--replay", log]) == 0
    assert re.match(r"\d\d+ decisions, all as recorded", capsys.readouterr().out)


@LONG
def test_answers_survive_any_rank_that_dies_or_hangs_at_any_point(
    tmp_path: Path, llama: Path, reference: GreedyReference
) -> None:
    wanted = [reference.tokens(prompt, ANSWER_TOKENS) for prompt in (LONG_PROMPT, SHORT_PROMPT)]
    path = write(tmp_path, llama, "loongserve", {}, apart(2), worker_timeout="2", max_restarts=50)
    with cluster(path) as running:
        url, losses = running.url, 0
        moments = [lambda url, one: queued_tokens(url, 0) or queued_tokens(url, 1), handing_over, decoding]
        for victim, rank, harm in ((0, 0, signal.SIGKILL), (1, 1, signal.SIGSTOP), (2, 1, signal.SIGKILL)):
            for moment in moments:
                until(lambda: all(each["state"] == "ready" for each in instances(url)))
                one, other = ClientStream(url, LONG_PROMPT), ClientStream(url, SHORT_PROMPT)
                until(lambda: moment(url, one) or not one.is_alive())  # noqa: B023
                os.kill(rank_pids(url, victim)[rank], harm)
                losses += 1
                assert [one.answer(), other.answer()] == wanted, (victim, rank, harm)
                until(lambda: metric(url, "headway_instance_restarts_total") == losses)  # noqa: B023
        until(lambda: not any(each["placed"] or each["kv_tokens_used"] for each in instances(url)))


@LONG
def test_groups_are_given_up_and_formed_again_for_a_while(
    tmp_path: Path, llama: Path, reference: GreedyReference
) -> None:
    """Requests of all lengths, some of which leave, five times."""
    prompts = [prompt_of(seed, 30 + 301 * seed) for seed in range(8)]
    wanted = [reference.tokens(prompt, 12) for prompt in prompts]
    path = write(tmp_path, llama, "tetris", {"sizes": [1, 2]}, apart(2))
    with cluster(path) as running, ThreadPoolExecutor(6) as pool:
        url = running.url
        for _ in range(5):
            asked = [pool.submit(streamed_ids, url, prompt, 12, ignore_eos=True) for prompt in prompts]
            leave_after_sending(url, prompt_of(9, 3000), 500)
            assert [one.result() for one in asked] == wanted
        until(lambda: not any(each["placed"] or each["kv_tokens_used"] for each in instances(url)))
        assert metric(url, "headway_instance_restarts_total") == 0
