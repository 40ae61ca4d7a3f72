"""Instances that are several processes each, alone and in groups, under the policies that make these."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.cluster_probe import cluster, write
from tests.helpers.cluster_streams import (
    queued_tokens,
)
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import leave_after_sending, metric, metric_reaches, streamed_ids
from tests.helpers.polling import until

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


def each(*sizes: tuple[str, int]) -> list[dict[str, Any]]:
    """Instances by role and tensor-parallel size."""
    return [{"role": role, "serve": {"tensor_parallel_size": size}} for role, size in sizes]


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
        ("fixed-sp", {"sp": 1}, each(("prefill", 2), ("prefill", 1), ("decode", 1), ("decode", 2))),
        ("tetris", {"sizes": [1]}, each(("prefill", 1), ("decode", 4))),
        ("pecsched", {"long_tokens": 300}, each(("prefill", 1), ("prefill", 1), ("decode", 2))),
        ("fifo", {"long_sp": 1, "long_tokens": 300}, each(("mixed", 2), ("mixed", 1))),
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
            until(lambda first=first: any(queued_tokens(url, number) for number in (0, 1)) or first.done())
            got = list(pool.map(lambda prompt: streamed_ids(url, prompt, 5, ignore_eos=True), chats))
            assert got == expected
            assert first.result() == reference.tokens(long, 5)
            if b'"SpanPaused"' in log.read_bytes():
                break
    assert b'"SpanPaused"' in log.read_bytes()
    assert main(["cluster", path, "--replay", str(log)]) == 0
