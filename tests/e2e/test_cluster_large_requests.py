"""Requests that are larger than any one instance's KV pool: a group holds them, each member its part."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cluster_probe import APART, cluster, instances, pid_of, write
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import metric, streamed_ids
from tests.helpers.polling import until

from headway.cli.main import main

POOL = 2048
"""KV tokens of each instance."""
LARGE = POOL * 8 // 5
SAID = 24


@pytest.fixture(scope="module")
def wanted(reference: GreedyReference) -> list[int]:
    return reference.tokens(prompt_of(1, LARGE), SAID)


@pytest.fixture(scope="module")
def short(reference: GreedyReference) -> list[int]:
    return reference.tokens(prompt_of(2, 200), SAID)


def pools_are_empty(url: str) -> bool:
    return not any(each["kv_tokens_used"] or each["placed"] for each in instances(url))


@pytest.mark.parametrize(
    ("placement", "options"),
    [
        ("fixed-sp", {"sp": 2}),
        pytest.param("ladder", {}, marks=pytest.mark.long),
        pytest.param("tetris", {"sizes": [1, 2]}, marks=pytest.mark.long),
        pytest.param("loongserve", {}, marks=pytest.mark.long),
        pytest.param("pecsched", {"long_tokens": 1000}, marks=pytest.mark.long),
        pytest.param("fifo", {"long_sp": 2}, marks=pytest.mark.long),
    ],
)
def test_a_prompt_larger_than_a_pool_is_answered_by_a_group_that_holds_it(
    tmp_path: Path, llama: Path, wanted: list[int], short: list[int], placement: str, options: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    log = str(tmp_path / "log.jsonl")
    path = write(tmp_path, llama, placement, options, APART, kv_cache_memory="512K")
    with cluster(path, "--event-log", log) as run, ThreadPoolExecutor(4) as pool:
        assert {each["kv_tokens_total"] for each in instances(run.url)} == {POOL}
        prompts = [prompt_of(1, LARGE), prompt_of(2, 200), prompt_of(1, LARGE), prompt_of(2, 200)]
        asked = [pool.submit(streamed_ids, run.url, prompt, SAID, ignore_eos=True) for prompt in prompts]
        assert [each.result() for each in asked] == [wanted, short, wanted, short]
        until(lambda: pools_are_empty(run.url))
    assert main(["cluster", path, "--replay", log]) == 0
    assert "all as recorded" in capsys.readouterr().out


@pytest.mark.long
def test_three_members_hold_what_two_do_not(tmp_path: Path, llama: Path, wanted: list[int]) -> None:
    pools = [{"count": 3, "role": "prefill"}, {"role": "decode"}]
    path = write(tmp_path, llama, "fixed-sp", {"sp": 3}, pools, kv_cache_memory="384K")
    with cluster(path) as run:
        assert streamed_ids(run.url, prompt_of(1, LARGE), SAID, ignore_eos=True) == wanted
        assert not instances(run.url)[-1]["decode_tokens_total"], "its group decodes it in place"
        until(lambda: pools_are_empty(run.url))


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_member_that_dies_in_either_phase_leaves_the_answer_as_it_is(
    tmp_path: Path, llama: Path, reference: GreedyReference, phase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log, said = str(tmp_path / "log.jsonl"), 60
    path = write(tmp_path, llama, "fixed-sp", {"sp": 2}, APART, kv_cache_memory="512K")
    with cluster(path, "--event-log", log) as run, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(streamed_ids, run.url, prompt_of(1, LARGE), said, ignore_eos=True)
        counted = {"prefill": "kv_tokens_used", "decode": "decode_tokens_total"}[phase]
        until(lambda: any(each[counted] for each in instances(run.url)) or asked.done())
        assert not asked.done()
        os.kill(pid_of(run.url, 1), signal.SIGKILL)
        assert asked.result() == reference.tokens(prompt_of(1, LARGE), said)
        until(lambda: metric(run.url, "headway_instance_restarts_total") == 1)
        until(lambda: pools_are_empty(run.url))
    assert main(["cluster", path, "--replay", log]) == 0
    assert "all as recorded" in capsys.readouterr().out
