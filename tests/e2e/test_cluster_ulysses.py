"""Fast SP live: long prompts that are computed with Ulysses, and groups that decode over KV by heads."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.cluster_probe import APART, cluster, instances, pid_of, write
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import metric, streamed_ids
from tests.helpers.polling import until

LONGS = [prompt_of(40 + seed, length) for seed, length in enumerate((1500, 1400, 1100))]
"""Each has more KV than is free on one of its two instances once each of these has its half."""
SHORTS = [prompt_of(50 + seed, length) for seed, length in enumerate((300, 40, 3, 100))]
COUNT = 60
ULYSSES = "tests.e2e.ulysses_pecsched.UlyssesPecSched"
"""PecSched itself takes what is cheaper on the machine at hand."""


@pytest.fixture(scope="module")
def expected(reference: GreedyReference) -> list[list[int]]:
    return [reference.tokens(prompt, COUNT) for prompt in (*LONGS, *SHORTS)]


def spans(log: str) -> list[tuple[tuple[int, ...], str]]:
    """Group and attention of all spans that the policy has committed."""
    decisions = [msgspec.json.decode(line) for line in Path(log).read_bytes().splitlines()[1:]]
    actions = [action for one in decisions for action in one.get("actions", ())]
    commits: list[dict[str, Any]] = [what for name, what in actions if name == "CommitSpans"]
    return [(tuple(span["group"]), span["strategy"]["attn"]) for one in commits for span in one["spans"]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("decode", "pool"),
    [("in-place", "4M"), ("gather", "512K")],
    ids=["in place", "gather, and nobody has room for the whole"],
)
def test_long_prompts_are_computed_with_ulysses_and_decoded_by_their_group(
    tmp_path: Path, short_llama: Path, expected: list[list[int]], decode: str, pool: str
) -> None:
    log, options = str(tmp_path / "log"), {"long_tokens": 500, "long_replicas": "fixed", "long_sp": 2}
    path = write(tmp_path, short_llama, ULYSSES, options, APART, decode, kv_cache_memory=pool, event_log=log)

    def ask(prompt: list[int]) -> list[int]:
        return streamed_ids(running.url, prompt, COUNT, ignore_eos=True)

    def empty() -> bool:
        return not any(each["placed"] or each["kv_tokens_used"] for each in instances(running.url))

    with cluster(path) as running, ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, (*LONGS, *SHORTS))) == expected
        assert metric(running.url, "headway_lost_tokens_total") == 0, "no run was lost"
        until(empty)
        if decode == "in-place":
            asked = [threads.submit(ask, prompt) for prompt in LONGS]
            until(lambda: instances(running.url)[0]["kv_tokens_used"])
            os.kill(pid_of(running.url, 0), signal.SIGKILL)
            assert [one.result() for one in asked] == expected[: len(LONGS)]
            until(empty)
    committed = spans(log)
    assert sum(one == ((0, 1), "ulysses") for one in committed) >= len(LONGS), committed
