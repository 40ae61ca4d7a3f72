"""Pools of `backend: vllm` in a cluster file: what they may say, the commands of their servers, and load pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.runtime.assembly.cluster import instance_settings
from headway.runtime.cluster.cluster_file import cluster_file
from headway.runtime.cluster.http_backend import LearnedLatency, PrefillQueue
from headway.runtime.cluster.http_server import ServerLoad, parse_load
from headway.runtime.cluster.server_command import server_words

URL = "http://127.0.0.1:1"


class RowLatency(GroupLatency):
    """10 ms a row."""

    source = "made up"

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        return 0.01 * tokens

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        return int(budget_s / 0.01)


ALONE_SHAPE = GroupShape(1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"pools": [{"urls": [URL]}]}, "say `backend: vllm` too"),
        ({"pools": [{"backend": "vllm", "urls": ["10.0.0.1:8000"]}]}, "no address such as"),
        ({"pools": [{"backend": "vllm", "urls": [URL], "command": "x"}]}, "leave out command"),
        ({"pools": [{"backend": "vllm", "serve": {"x": 1}}]}, "give the flags of vLLM servers in `command`"),
        ({"pools": [{"backend": "vllm", "urls": [URL], "count": 2}]}, "there are 1 urls"),
        ({"pools": [{"backend": "vllm", "urls": [URL], "kv_events": ["tcp://a:1"] * 2}]}, "give one for each"),
        ({"pools": [{"backend": "vllm", "urls": [URL], "kv_events": ["10.0.0.1:5557"]}]}, "such as tcp://"),
        ({"pools": [{"backend": "vllm", "role": "decode"}]}, "leave out role"),
        ({"pools": [{"backend": "vllm", "role": "prefill"}]}, "one has to decode"),
        ({"pools": [{"backend": "vllm"}, {}]}, "all have to be of one backend"),
        ({"pools": [{"backend": "vllm"}], "placement": "tetris"}, "tetris does not work on .* use ladder or jsq"),
        ({"pools": [{"backend": "vllm"}], "placement": "fifo"}, "fifo does not work on"),
    ],
)
def test_what_servers_behind_http_cannot_do_is_one_sentence(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster_file(data, "cluster.yaml")


def test_policies_of_whole_requests_are_accepted() -> None:
    own = "tests.conformance.conformance_policy.Verbs"
    for name, options in (("jsq", {}), ("ladder", {}), (own, {"heard": "x"})):
        pools = [{"backend": "vllm", "urls": [URL]}]
        assert cluster_file({"pools": pools, "placement": name, "options": options}, "c").behind_http


def test_a_setting_of_an_engine_is_refused_for_servers_with_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"pools: [{{backend: vllm, urls: ['{URL}']}}]\nserve: {{max_model_len: 8K}}\n")
    assert main(["cluster", str(path)]) == 2
    assert "--max-model-len is of an engine" in capsys.readouterr().err
    assert main(["cluster", str(path), "--dry-run"]) == 2
    assert "--dry-run and --replay" in capsys.readouterr().err


def test_the_marks_of_a_command_are_filled_in_and_other_braces_stay() -> None:
    words = server_words("vllm serve {model} --port={port} -x '{\"a\": {}}' {index}", "m", 3, 80, "x")
    assert words == ["vllm", "serve", "m", "--port=80", "-x", '{"a": {}}', "3"]
    with pytest.raises(ConfigError, match="cannot be read"):
        server_words("vllm 'serve", "m", 0, 80, "x")


def test_without_a_command_vllm_serves_with_headways_scheduler() -> None:
    words = server_words(None, "m", 0, 80, '{"a b": 1}')
    assert words[:7] == ["vllm", "serve", "m", "--host", "127.0.0.1", "--port", "80"]
    assert words[words.index("--scheduler-cls") + 1] == "headway.vllm.Scheduler"
    assert words[-2:] == ["--kv-events-config", '{"a b": 1}']


def test_started_servers_publish_their_kv_events_where_their_command_says_so(tmp_path: Path) -> None:
    pools = [
        {"backend": "vllm", "urls": [URL, f"{URL}2"], "kv_events": ["tcp://a:5", "tcp://b:6"]},
        {"backend": "vllm", "command": "x --kv-events-config={kv_events}"},
        {"backend": "vllm", "command": "x {port}"},
        {"backend": "vllm"},
    ]
    *found, said, silent, ours = instance_settings(cluster_file({"pools": pools}, "c"), "m", tmp_path)
    assert [each.kv_events for each in found] == ["tcp://a:5", "tcp://b:6"]
    assert silent.kv_events is None
    for each in (said, ours):
        assert each.process is not None
        assert each.kv_events is not None
        (config,) = [word for word in each.process.words if "replay_endpoint" in word]
        assert json.loads(config.removeprefix("--kv-events-config="))["endpoint"] == each.kv_events


def test_instances_are_numbered_over_the_pools(tmp_path: Path) -> None:
    pools = [{"backend": "vllm", "urls": [URL, f"{URL}2"]}, {"backend": "vllm", "count": 2, "command": "x {index}"}]
    found = instance_settings(cluster_file({"pools": pools}, "c"), "m", tmp_path)
    assert [each.pool for each in found] == [0, 0, 1, 1]
    assert [each.process.words for each in found if each.process is not None] == [["x", "2"], ["x", "3"]]


def test_a_metrics_page_of_several_engines_is_summed() -> None:
    page = """# HELP vllm:num_requests_running Running.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="None",engine="1"} 1.0
vllm:prompt_tokens_total{engine="0"} 1e3
vllm:broken x
headway_prefill_seconds{engine="0",tokens="256"} 0.5
headway_prefill_seconds{engine="0",tokens="64"} 0.25
headway_prefill_seconds{engine="1",tokens="64"} 0.75
"""
    assert parse_load(page) == ServerLoad(4, 2, 0.5, 1600, 16, 1000, 0, ((64, 0.5), (256, 0.5)))
    assert parse_load("nothing here") == ServerLoad()


def test_an_instances_factor_is_learnt_from_prompts_that_it_computes_alone() -> None:
    latency = LearnedLatency(RowLatency())
    fast, slow = PrefillQueue(0, latency), PrefillQueue(1, latency)
    base = latency.prompt_s(0, 100)
    slow.add("a", 100, 0.0)
    slow.first_token("a", 4 * base)
    assert latency.prompt_s(1, 100) == pytest.approx(4 * base)
    # Not measured yet: as the others.
    assert latency.prompt_s(0, 100) == pytest.approx(4 * base)
    fast.add("b", 100, 0.0)
    fast.first_token("b", base)
    assert latency.prompt_s(0, 100) == pytest.approx(base)
    # "a" still decodes: what it makes others wait is no property of prompts.
    slow.add("c", 100, 10.0)
    slow.first_token("c", 10.0 + 50 * base)
    assert latency.prompt_s(1, 100) == pytest.approx(4 * base)


def test_what_an_instance_has_learnt_itself_takes_the_place_of_the_model() -> None:
    latency = LearnedLatency(RowLatency())
    queue, other = PrefillQueue(0, latency), PrefillQueue(1, latency)
    queue.add("a", 100, 0.0)
    queue.first_token("a", 5.0)
    queue.report([(100, 2.0), (1000, 40.0)])
    assert latency.prompt_s(0, 100) == pytest.approx(2.0)
    assert latency.prompt_s(0, 1000) == pytest.approx(40.0)
    assert latency.prompt_s(0, 550) == pytest.approx(5.5 * 3)
    assert latency.prompt_s(0, 10_000) == pytest.approx(400.0)
    # Not known: as the others, also of a part of a prompt.
    assert latency.prompt_s(1, 1000) == latency.prefill_s(0, 1000, ALONE_SHAPE) == pytest.approx(40.0)
    assert latency.prefill_s(900, 100, ALONE_SHAPE) == pytest.approx(4.0)
    assert latency.solve_tokens(0, 40.0, ALONE_SHAPE) > 900
    other.report([(100, 1.0)])
    assert latency.prefill_s(0, 1000, ALONE_SHAPE) == pytest.approx(25.0)
    # First tokens tell how far it is off.
    queue.add("b", 1000, 50.0)
    queue.first_token("b", 50.0 + 60.0)
    queue.remove("a", 110.0)
    queue.remove("b", 110.0)
    queue.add("c", 1000, 200.0)
    queue.first_token("c", 200.0 + 60.0)
    assert latency.prompt_s(0, 100) == pytest.approx(3.0)
    queue.report([(100, 4.0)])
    assert latency.prompt_s(0, 100) == pytest.approx(6.0)
    queue.report([])
    assert latency.prompt_s(0, 100) == latency.prompt_s(1, 100) == pytest.approx(1.0)


def test_what_is_left_of_a_queue_shrinks_with_time_and_with_first_tokens() -> None:
    queue = PrefillQueue(0, LearnedLatency(RowLatency()))
    assert queue.left_s(5.0) == 0.0
    queue.add("a", 10, 0.0)
    alone = queue.left_s(0.0)
    queue.add("b", 10, 0.0)
    assert queue.left_s(0.0) == pytest.approx(2 * alone)
    assert queue.left_s(alone / 2) == pytest.approx(1.5 * alone)
    assert 0 < queue.left_s(1e6) < alone
    queue.remove("b", 1.0)
    queue.remove("b", 1.0)
    assert (queue.queued_tokens, queue.requests) == (10, 1)
