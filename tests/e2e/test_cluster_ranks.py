"""Prefill and decode instances of different tensor-parallel size: exact answers, and ranks that die or hang."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.helpers.cluster_probe import cluster, instances, write
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import metric, metric_reaches, streamed_ids

from headway.cli.main import main

LONG = pytest.mark.long
PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((900, 20, 3, 500, 60, 333))]


def pools(*sizes: tuple[str, int]) -> list[dict[str, object]]:
    return [{"role": role, "serve": {"tensor_parallel_size": size}} for role, size in sizes]


@pytest.mark.parametrize(
    ("placement", "options", "sizes"),
    [
        pytest.param("fixed-sp", {"sp": 1}, [("prefill", 2), ("prefill", 1), ("decode", 1), ("decode", 2)], marks=LONG),
        pytest.param("tetris", {"sizes": [1]}, [("prefill", 1), ("decode", 4)], marks=LONG),
        pytest.param("pecsched", {"long_tokens": 300}, [("prefill", 1), ("prefill", 1), ("decode", 2)], marks=LONG),
        pytest.param("fifo", {"long_sp": 1, "long_tokens": 300}, [("mixed", 2), ("mixed", 1)], marks=LONG),
    ],
)
def test_greedy_tokens_equal_transformers(
    tmp_path: Path,
    llama: Path,
    reference: GreedyReference,
    placement: str,
    options: object,
    sizes: list[tuple[str, int]],
) -> None:
    """All pairs of sizes in one cluster; spans of groups, where their instances are one process; decisions replay."""
    log = str(tmp_path / "log")
    path = write(tmp_path, llama, placement, options, pools(*sizes), event_log=log)
    with cluster(path) as running:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            got = list(pool.map(lambda prompt: streamed_ids(running.url, prompt, 20, ignore_eos=True), PROMPTS))
        assert got == [reference.tokens(prompt, 20) for prompt in PROMPTS]
        metric_reaches(running.url, "headway_instance_requests_placed", lambda placed: placed == 0)
        metric_reaches(running.url, "headway_instance_kv_tokens_used", lambda used: used == 0)
        assert metric(running.url, "headway_instance_restarts_total") == 0
        for (role, _), each in zip(sizes, instances(running.url), strict=True):
            assert each["decode_tokens_total"] or role != "decode"
            assert not each["decode_tokens_total"] or role != "prefill" or placement == "pecsched"  # long ones stay
    assert main(["cluster", path, "--replay", log]) == 0
