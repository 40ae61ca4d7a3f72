"""Instances that are several processes each, in groups that pause. Their answers: `test_cluster_answers`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.cluster_probe import cluster, write
from tests.helpers.cluster_streams import (
    queued_tokens,
)
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import streamed_ids
from tests.helpers.polling import until

from headway.cli.main import main

LONG = pytest.mark.long
GROUPS = {"long_tokens": 1000, "long_sp": 2, "long_replicas": "fixed"}
"""All long prompts on two instances."""
POOLS = [
    {"count": 2, "role": "prefill", "serve": {"tensor_parallel_size": 2}},
    {"count": 1, "role": "decode", "serve": {"tensor_parallel_size": 1}},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("rank-groups-llama"), max_position_embeddings=16384)


@pytest.fixture(scope="module")
def reference(llama: Path) -> GreedyReference:
    return GreedyReference(llama)


@LONG
def test_chats_go_before_a_prompt_that_pauses_within_itself(
    tmp_path: Path, llama: Path, reference: GreedyReference
) -> None:
    """PecSched: a long prompt on two instances of two processes is paused for short ones, between layers."""
    log = tmp_path / "log"
    path = write(tmp_path, llama, "pecsched", GROUPS, POOLS, event_log=str(log))
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
