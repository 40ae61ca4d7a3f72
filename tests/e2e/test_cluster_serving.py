"""`headway cluster` as its users meet it: members that come and go, floods, bad files. Answers under every policy:
`test_cluster_answers`."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.helpers.cluster_probe import APART, MIXED, cluster, instances, write
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import metric
from tests.helpers.polling import until

from headway.cli.main import main

PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((1500, 20, 3, 700, 60, 333, 2000, 100))]


@pytest.fixture(scope="module")
def expected(reference: GreedyReference) -> list[list[int]]:
    return [reference.tokens(prompt, 20) for prompt in PROMPTS]


LONG = pytest.mark.long


@LONG
def test_instances_join_drain_and_leave_while_serving(tmp_path: Path, llama: Path, expected: list[list[int]]) -> None:
    path = write(tmp_path, llama, "fixed-sp", {"sp": 1}, [{"count": 1}])
    key = {"Authorization": "Bearer operator"}
    keys = ["--api-key", "secret", "--admin-key", "operator"]
    with cluster(path, *keys) as running, httpx.Client(headers=key, timeout=60) as client:
        url = running.url
        client.base_url = httpx.URL(url)
        assert httpx.get(f"{url}/v1/cluster").status_code == 401
        assert client.delete("/v1/cluster/instances/0").status_code == 400
        assert client.delete("/v1/cluster/instances/7").status_code == 404
        assert client.post("/v1/cluster/instances", json={"pool": 3}).status_code == 400
        answer = client.post("/v1/cluster/instances", json={"pool": 0})
        assert (answer.status_code, answer.json()["id"], answer.json()["state"]) == (202, 1, "starting")

        def state(number: int) -> str:
            found = client.get(f"/v1/cluster/instances/{number}")
            return found.json()["state"] if found.status_code == 200 else ""

        def ask(prompt: list[int]) -> list[int]:
            body = {"model": llama.name, "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
            answer = client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
            ids: list[int] = answer["choices"][0]["token_ids"]
            return ids

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            early = [pool.submit(ask, prompt) for prompt in PROMPTS]
            until(lambda: state(1) == "ready")
            answers = [pool.submit(ask, prompt) for prompt in PROMPTS]
            until(lambda: client.get("/v1/cluster/instances/1").json()["placed"])
            assert client.delete("/v1/cluster/instances/0").json()["state"] == "draining"
            assert [future.result() for future in early] == expected
            assert [future.result() for future in answers] == expected
        until(lambda: state(0) == "")
        assert ask(PROMPTS[1]) == expected[1]
        assert metric(url, "headway_engine_up") == 1
        assert client.get("/health").json()["engine_restarts"] == 0


@LONG
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pools: []", "pools is empty"),
        ("pools: [{count: 0}]", r"pools\[0\].count must be at least 1, not 0"),
        ("pools: [{per_node: 2}]", r"pools\[0\]: per_node must be between 1 and its count"),
        ("pools: [{}]\nbackends: 0", "backends must be at least 1"),
        ("pools: [{role: prefill}]\nplacement: jsq", "jsq gives whole requests to instances of role mixed"),
        ("pools: [{role: decode}]\nplacement: tetris", "one has to prefill"),
        ("pools: [{}]\nplacement: pecsched", "or say `disaggregate: false`"),
        ("pools: [{serve: {kv_parallel_size: 2}}]\nplacement: fifo", "with `long_sp: 1`"),
        (
            "pools: [{serve: {tensor_parallel_size: 2}}, {}, {role: decode}]\nplacement: pecsched",
            r"size is 2 in pools\[0\] and 1 in pools\[1\]: instances that compute a prompt together .* `sizes: \[1\]`",
        ),
        (
            "pools: [{}, {role: decode, serve: {pipeline_parallel_size: 2}}]\nplacement: tetris",
            r"pools\[1\] is of instances with pipeline stages or KV groups .* serve whole requests",
        ),
        ("pools: [{host: 1}]", "several hosts need --ray-address"),
        ("pools: [{host: -1}]", r"pools\[0\].host must be at least 0, not -1"),
        ("pools: [{}]\nserve: {nnodes: 2}", "in a cluster a pool says `host`"),
        ("pools: [{serve: {nnodes: 2}}]", r"pools\[0\].serve.nnodes: say that for all of the cluster"),
        ("pools: [{}]\nnetwork_gbit_s: 0", "network_gbit_s must be above 0"),
        ("pools: [{count: 2}]\nplacement: fifo\noptions: {long_sp: 9}", "options.long_sp is 9, and .* 2 can prefill"),
        ("pools: [{count: 2}]\nplacement: fixed-sp\noptions: {sp: 7}", "options.sp is 7"),
        ("pools: [{count: 2}]\nplacement: fifo\noptions: {long_sp: 0}", "long_sp must be at least 1"),
        ("pools: [{count: 2}, {role: decode}]\nplacement: tetris\noptions: {sizes: [4]}", "sizes names none up to 2"),
        (
            "pools: [{}, {role: decode}]\nplacement: tetris\noptions: {sizes: [2, 4]}",
            "sizes names none up to 1, .* 1 can",
        ),
        ("pools: [{}]\npools: [{count: 2}]", "'pools' stands there twice"),
        ("pools: [{count: 1, role: mixed, count: 2}]", "'count' stands there twice"),
        ("pools: [{}]\nplacement: nope", "unknown placement 'nope'"),
        (
            "pools: [{}]\nplacement: fifo\noptions: {colour: red}",
            "colour is not a field; allowed here: mode, long_tokens",
        ),
        ("pools: [{serve: {portt: 1}}]", "unknown setting 'portt'"),
        ("pools: [{}]\nnodes: 3", "nodes is not a field; allowed here: pools, model, "),
        (
            "pools: [{rolle: mixed}]",
            r"pools\[0\].rolle is not a field; .* \(did you mean role\?\)",
        ),
        ("pools: [{role: both}]", r"pools\[0\].role must be 'prefill', 'decode' or 'mixed', not 'both'"),
        ("pools: [{}]\ngroup_decode: in_place", "group_decode must be 'gather' or 'in-place', not 'in_place'"),
        (
            "pools: [{}]\nplacement: pecsched\noptions: {long_replicas: many}",
            r"long_replicas must be 'memory', 'latency' or 'fixed'",
        ),
        ("pools: [{}]\nserve: {max_model_len: 32K, max-model-len: 64k}", "are one setting: say it once"),
        ("- pools", r"must be a mapping of settings, such as 'pools: \[\{count: 2\}\]'"),
        ("1: 2", ": 1 is not the name of a setting: these are words, such as 'pools: "),
        ("pools: [{serve: {api_key: secret}}]", r"pools\[0\].serve.api_key: say that for all of the cluster"),
        ("pools: [{}]\nmodel: ./nowhere", "is not a folder"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert main(["cluster", str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error)
    assert error.count("\n") == 1


@LONG
def test_a_dry_run_says_what_fits_and_which_groups(
    tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["cluster", write(tmp_path, llama, "fifo", {"long_tokens": 2000, "long_sp": 2}, MIXED), "--dry-run"]) == 0
    )
    out = capsys.readouterr().out
    assert "fifo, 3 instances" in out
    assert "pool 0: 3 x mixed, 1 threads each" in out
    assert "longest context      4,096 tokens" in out
    assert "1,024   in the batches of instance 0" in out
    assert "4,031   tokens 0 to 4,031 on instances 0+1" in out
    assert "what rate to expect: `headway simulate" in out
