"""More prompts than KV: those whose prompts are computed decode and give their room back, and all are answered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.cluster_probe import APART, cluster, instances, write
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import streamed_ids
from tests.helpers.polling import until

from headway.cli.main import main


@pytest.mark.parametrize(
    ("placement", "options", "count", "lengths", "said"),
    [
        pytest.param("fifo", {"long_tokens": 500, "long_sp": 2}, 2, [900] * 6, 8, marks=pytest.mark.long),
        pytest.param("fifo", {"long_tokens": 500, "long_sp": 2}, 2, [1900, 1800, 1900], 20, marks=pytest.mark.long),
        pytest.param("fixed-sp", {"sp": 2}, 2, [1900, 1990, 1900], 10, marks=pytest.mark.long),
        pytest.param("tetris", {"sizes": [1, 2]}, 2, [1500] * 6, 10, marks=pytest.mark.long),
        pytest.param("loongserve", {}, 2, [1500] * 6, 10, marks=pytest.mark.long),
    ],
)
def test_prompts_that_do_not_fit_together_are_answered_one_after_the_other(
    tmp_path: Path,
    short_llama: Path,
    reference: GreedyReference,
    placement: str,
    options: dict[str, Any],
    count: int,
    lengths: list[int],
    said: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = [prompt_of(seed, length) for seed, length in enumerate(lengths)]
    wanted = [reference.tokens(prompt, said) for prompt in prompts]
    path = write(tmp_path, short_llama, placement, options, [{"count": count}], kv_cache_memory="512K")
    log = str(tmp_path / "log.jsonl")
    with cluster(path, "--event-log", log) as run, ThreadPoolExecutor(len(prompts)) as pool:
        assert {each["kv_tokens_total"] for each in instances(run.url)} == {2048}
        asked = [pool.submit(streamed_ids, run.url, prompt, said, ignore_eos=True) for prompt in prompts]
        assert [each.result() for each in asked] == wanted
        until(lambda: not any(each["kv_tokens_used"] for each in instances(run.url)))
    assert main(["cluster", path, "--replay", log]) == 0
    assert "all as recorded" in capsys.readouterr().out


@pytest.mark.long
def test_a_flood_is_answered_or_refused_and_leaves_nothing_behind(
    tmp_path: Path, short_llama: Path, reference: GreedyReference
) -> None:
    prompt, said = prompt_of(7, 600), 12
    wanted = reference.tokens(prompt, said)
    path = write(
        tmp_path, short_llama, "tetris", {"sizes": [1, 2]}, APART, kv_cache_memory="512K", max_queued_requests=4
    )
    limits = httpx.Limits(max_connections=60)
    with cluster(path) as run, httpx.Client(timeout=120, limits=limits) as client, ThreadPoolExecutor(60) as pool:
        model = client.get(f"{run.url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": prompt, "max_tokens": said, "temperature": 0, "return_token_ids": True}
        body["ignore_eos"] = True
        sent = [pool.submit(client.post, f"{run.url}/v1/completions", json=body) for _ in range(60)]
        answers = [each.result() for each in sent]
        refused = [answer for answer in answers if answer.status_code != 200]
        assert len(answers) - len(refused) >= 12, "as many may wait as all instances together hold"
        assert refused
        assert all(answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1 for answer in refused)
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["token_ids"] == wanted
        until(lambda: not any(each["kv_tokens_used"] or each["placed"] for each in instances(run.url)))
