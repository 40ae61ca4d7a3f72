"""`headway cluster` under every policy and kind of instance: all requests at once, the tokens of transformers, nothing
left behind, and decisions that replay.

Members of a group that die: `tests/router/test_large_requests.py`; any instance: `test_cluster_chaos`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.cluster_probe import APART, MIXED, cluster, instances, write
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import leave_after_sending, metric, streamed_ids
from tests.helpers.polling import until

from headway.cli.main import main

LONG = pytest.mark.long
POOL = 2048
"""KV tokens of an instance with `TIGHT`."""
TIGHT = {"kv_cache_memory": "512K"}
LARGE = [POOL * 8 // 5, 200, POOL * 8 // 5, 200]
"""Lengths of prompts of which two are larger than any one instance's pool: a group holds them, each member its part."""
ALL = [1500, 20, 3, 700, 60, 333, 2000, 100]
SHORT = {"long_tokens": 500}
FOLLOWS = {"affinity": True}
ONE_POOL = {**SHORT, "disaggregate": False, "affinity": True}
GROUPS = {**SHORT, "long_sp": 2, "long_replicas": "fixed"}
"""All long prompts on two instances."""
TWO = {"tensor_parallel_size": 2}
RANKS = [{"count": 2, "serve": TWO}]
PAIR = [{"count": 2}]


def apart(decode: int = 1, **prefill: Any) -> list[dict[str, Any]]:
    return [
        {"count": 2, "role": "prefill", "serve": {**TWO, **prefill}},
        {"count": 1, "role": "decode", "serve": {"tensor_parallel_size": decode}},
    ]


def each(*sizes: tuple[str, int]) -> list[dict[str, Any]]:
    """Instances by role and tensor-parallel size."""
    return [{"role": role, "serve": {"tensor_parallel_size": size}} for role, size in sizes]


QUICK: list[tuple[str, object, object, list[int], dict[str, Any]]] = [
    ("pecsched", {**SHORT, "affinity": True}, APART, ALL, {}),
    ("fixed-sp", {"sp": 2}, APART, LARGE, TIGHT),
]
SLOW: list[tuple[str, object, object, list[int], dict[str, Any]]] = [
    ("loongserve in-place", {}, MIXED, ALL, {}),
    ("tetris", FOLLOWS, APART, ALL, {}),
    ("tetris", FOLLOWS, MIXED, ALL, {}),
    ("fifo in-place", SHORT, MIXED, ALL, {}),
    ("ladder", {}, APART, ALL, {}),
    ("fixed-sp", {"sp": 2}, APART, ALL, {}),
    ("context-parallel", {}, APART, ALL, {}),
    ("loongserve", {}, APART, ALL, {}),
    ("fifo", SHORT, APART, ALL, {}),
    ("jsq", FOLLOWS, MIXED, ALL, {}),
    ("priority", SHORT, MIXED, ALL, {}),
    ("reservation", {**SHORT, "long_sp": 2}, MIXED, ALL, {}),
    ("pecsched", ONE_POOL, MIXED, ALL, {}),
    # Instances that are several processes each, alone and in groups.
    ("tetris", {"sizes": [1, 2]}, apart(2, tensor_parallel_size=4), ALL, {}),
    ("pecsched", GROUPS, apart(), ALL, {}),
    ("ladder", {}, apart(4), ALL, {}),
    ("tetris", {"sizes": [1, 2]}, RANKS, ALL, {}),
    ("pecsched in-place", {**GROUPS, "disaggregate": False}, RANKS, ALL, {}),
    ("loongserve in-place", {}, RANKS, ALL, {}),
    ("fixed-sp", {"sp": 1}, each(("prefill", 2), ("prefill", 1), ("decode", 1), ("decode", 2)), ALL, {}),
    ("tetris", {"sizes": [1]}, each(("prefill", 1), ("decode", 4)), ALL, {}),
    ("pecsched", {"long_tokens": 300}, each(("prefill", 1), ("prefill", 1), ("decode", 2)), ALL, {}),
    ("fifo", {"long_sp": 1, "long_tokens": 300}, each(("mixed", 2), ("mixed", 1)), ALL, {}),
    # Prompts larger than a pool.
    ("ladder", {}, APART, LARGE, TIGHT),
    ("tetris", {"sizes": [1, 2]}, APART, LARGE, TIGHT),
    ("loongserve", {}, APART, LARGE, TIGHT),
    ("pecsched", {"long_tokens": 1000}, APART, LARGE, TIGHT),
    ("fifo", {"long_sp": 2}, APART, LARGE, TIGHT),
    # More prompts than KV: those that are computed decode and give their room back.
    ("fifo", {"long_tokens": 500, "long_sp": 2}, PAIR, [900] * 6, TIGHT),
    ("fifo", {"long_tokens": 500, "long_sp": 2}, PAIR, [1900, 1800, 1900], TIGHT),
    ("fixed-sp", {"sp": 2}, PAIR, [1900, 1990, 1900], TIGHT),
    ("tetris", {"sizes": [1, 2]}, PAIR, [1500] * 6, TIGHT),
    ("loongserve", {}, PAIR, [1500] * 6, TIGHT),
]
SAID = 20


def all_at_once(url: str, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: streamed_ids(url, p, SAID, ignore_eos=True), prompts))


def cached_tokens(url: str, prompt: list[int]) -> int:
    body = {"model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"], "prompt": prompt, "max_tokens": 1}
    usage = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def nothing_left(url: str) -> bool:
    return not any(each["placed"] or each["kv_tokens_used"] for each in instances(url))


@pytest.mark.parametrize(
    ("placement", "options", "pools", "lengths", "settings"),
    [*QUICK, *(pytest.param(*case, marks=LONG) for case in SLOW)],
)
def test_greedy_tokens_equal_transformers_with_all_requests_at_once(
    tmp_path: Path,
    llama: Path,
    reference: GreedyReference,
    placement: str,
    options: object,
    pools: object,
    lengths: list[int],
    settings: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, _, decode = placement.partition(" ")
    prompts = [prompt_of(seed, length) for seed, length in enumerate(lengths)]
    expected = [reference.tokens(prompt, SAID) for prompt in prompts]
    log = tmp_path / "log"
    # Instances of a cluster that logs cache no prefixes: those whose caches are looked at have no log.
    logs = {"event_log": str(log)} if settings or pools not in (APART, MIXED) else {}
    path = write(tmp_path, llama, name, options, pools, decode or "gather", **logs, **settings)
    with cluster(path) as running:
        url = running.url
        if settings == TIGHT:
            assert {each["kv_tokens_total"] for each in instances(url)} == {POOL}
        assert all_at_once(url, prompts) == expected
        # Again: instances have cached what they computed and what was handed over to them.
        hits = metric(url, "headway_prefix_cache_hits_total")
        assert all_at_once(url, prompts) == expected
        if pools is MIXED and options in (FOLLOWS, ONE_POOL):
            # Instances report what they have done a moment later.
            until(lambda: metric(url, "headway_prefix_cache_hits_total") > hits + 3000)
            assert cached_tokens(url, prompts[6]) > 1900
        if settings != TIGHT:
            leave_after_sending(url, prompt_of(9, 3500), 500)
        until(lambda: nothing_left(url))
        assert metric(url, "headway_instance_up") == len(instances(url))
        assert metric(url, "headway_instance_restarts_total") == 0
    if logs:
        assert main(["cluster", path, "--replay", str(log)]) == 0
        assert "all as recorded" in capsys.readouterr().out


@LONG
def test_three_members_hold_what_two_do_not(tmp_path: Path, llama: Path, reference: GreedyReference) -> None:
    pools = [{"count": 3, "role": "prefill"}, {"role": "decode"}]
    path = write(tmp_path, llama, "fixed-sp", {"sp": 3}, pools, kv_cache_memory="384K")
    with cluster(path) as run:
        prompt = prompt_of(1, LARGE[0])
        assert streamed_ids(run.url, prompt, SAID, ignore_eos=True) == reference.tokens(prompt, SAID)
        assert not instances(run.url)[-1]["decode_tokens_total"], "its group decodes it in place"
        until(lambda: nothing_left(run.url))
