"""LoongServe's elastic decode as its users meet it: groups that grow and shrink under answers that stay the same."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.cluster_probe import cluster, instances, write
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import metric, streamed_ids
from tests.helpers.polling import until

from headway.cli.main import main

LONG = pytest.mark.long
MIXED = [{"count": 4}]
TOGETHER = [prompt_of(20 + seed, length) for seed, length in enumerate((900, 1000, 800, 900))]
"""More than two instances' KV, and less than three: their decodes keep three of four, or two."""
SHORTS = [prompt_of(30 + seed, length) for seed, length in enumerate((20, 60, 100, 333, 40, 80, 30, 50))]
"""More than one instance is to decode."""
COUNT = 80


@pytest.fixture(autouse=True)
def slow_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiled kernels: beside these, prompts of a tiny model are not worth a group that later shrinks."""
    monkeypatch.setenv("HEADWAY_NATIVE", "0")


@pytest.fixture(scope="module")
def wanted(reference: GreedyReference) -> list[list[int]]:
    return [reference.tokens(prompt, COUNT) for prompt in (*TOGETHER, *SHORTS)]


def steep_profile(folder: Path, model: Path) -> str:
    """A profile in which many rows take more than their share of time, so that groups are worth it on any machine."""
    file = folder / "profile.json"
    flags = ["--threads", "1", "--budget", "1", "--serve-for", "0", "--out", str(file)]
    assert main(["profile", str(model), *flags]) == 0
    steep = {"tokens": [[0, 0.001], [1, 0.0011], [256, 0.01], [1024, 0.2]]}
    file.write_text(json.dumps(json.loads(file.read_text()) | steep))
    return str(file)


def report(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/cluster", timeout=10).json()
    return found


def ask(pool: ThreadPoolExecutor, url: str, prompts: list[list[int]]) -> list[Future[list[int]]]:
    return [pool.submit(streamed_ids, url, prompt, COUNT, ignore_eos=True) for prompt in prompts]


def answers(futures: list[Future[list[int]]]) -> list[list[int]]:
    return [future.result() for future in futures]


def seen(
    pool: ThreadPoolExecutor, url: str, prompts: list[list[int]], wanted: list[list[int]], *counts: str
) -> dict[str, Any]:
    """What the cluster reports once it has done such things: how many come at which time is not said."""
    for _ in range(8):
        assert answers(ask(pool, url, prompts)) == wanted
        until(lambda: empty(url))
        said = report(url)
        if all(said[count] for count in counts):
            return said
    raise AssertionError(f"none of {counts}: {said}")


def grown(pool: ThreadPoolExecutor, url: str, before: int) -> list[Future[list[int]]]:
    """Requests that are being answered while a group has grown; asked again where their answers came first."""
    for _ in range(8):
        asked = ask(pool, url, SHORTS)
        until(lambda: report(url)["groups_grown"] > before or all(each.done() for each in asked))  # noqa: B023
        if report(url)["groups_grown"] > before:
            return asked
        until(lambda: empty(url))
    raise AssertionError("no group has grown")


def empty(url: str) -> bool:
    return not any(each["placed"] or each["kv_tokens_used"] for each in instances(url))


def replays(path: str, log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", path, "--replay", log]) == 0
    assert re.search(r"\d\d+ decisions, all as recorded", capsys.readouterr().out)


@LONG
def test_groups_shrink_and_grow_and_one_of_them_dies(
    tmp_path: Path, short_llama: Path, wanted: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(tmp_path / "log")
    small = {"kv_cache_memory": "512K", "latency_profile": steep_profile(tmp_path, short_llama)}
    path = write(tmp_path, short_llama, "loongserve", {"decode_batch": 1}, MIXED, "in-place", event_log=log, **small)
    with cluster(path) as running, ThreadPoolExecutor(16) as pool:
        url = running.url
        seen(pool, url, TOGETHER, wanted[:4], "groups_shrunk")  # a prompt's group has kept what its KV needs
        said = seen(pool, url, SHORTS, wanted[4:], "decodes_moved", "groups_grown")  # others have joined decodes
        asked = grown(pool, url, said["groups_grown"])
        busiest = max(instances(url), key=lambda each: each["placed"])
        os.kill(int(busiest["pid"]), signal.SIGKILL)
        assert answers(asked) == wanted[4:]
        until(lambda: metric(url, "headway_instance_restarts_total") == 1)
        until(lambda: empty(url))
    replays(path, log, capsys)


@LONG
def test_decodes_of_instances_of_several_processes_follow_their_group(
    tmp_path: Path, short_llama: Path, wanted: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    log, small = str(tmp_path / "log"), {"kv_cache_memory": "512K"}
    pools: list[dict[str, Any]] = [{"count": 2, "serve": {"tensor_parallel_size": 2}}]
    path = write(tmp_path, short_llama, "loongserve", {"decode_batch": 1}, pools, "in-place", event_log=log, **small)
    with cluster(path) as running, ThreadPoolExecutor(16) as pool:
        seen(pool, running.url, SHORTS, wanted[4:], "decodes_moved")
    replays(path, log, capsys)
