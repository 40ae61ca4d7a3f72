"""`headway serve` as its users meet it: real processes, real sockets, real (tiny) models."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import (
    complete,
    leave_after_sending,
    metric,
    metric_reaches,
    model_of,
    stream,
    streamed_ids,
    token_ids,
)
from tests.helpers.process_tree import engine_pid

from headway.serving.load.convoy import ServerError, ServerProcess

LONG = pytest.mark.long


@pytest.fixture(
    scope="module",
    params=[
        "lars",
        pytest.param("srpt+static:64", marks=[LONG, pytest.mark.xdist_group("srpt")]),
        pytest.param("fcfs+whole", marks=[LONG, pytest.mark.xdist_group("fcfs")]),
    ],
)
def server(request: pytest.FixtureRequest, llama: Path) -> Iterator[str]:
    policy, _, chunking = request.param.partition("+")
    arguments = [str(llama), "--scheduling-policy", policy, "--chunking", chunking or "adaptive", "--t-target-ms", "5"]
    with ServerProcess([*arguments, "--latency-profile", "quick"]) as running:
        yield running.url


def test_greedy_tokens_equal_transformers_with_long_and_short_requests_at_once(
    server: str, reference: GreedyReference
) -> None:
    shapes = [(1500, 6), (20, 12), (3, 20), (700, 5), (60, 9), (1, 15), (333, 7), (129, 11)]
    prompts = [(prompt_of(seed, length), count) for seed, (length, count) in enumerate(shapes)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(streamed_ids, server, p, n, ignore_eos=True) for p, n in prompts]
        answers = [future.result() for future in futures]
    assert answers == [reference.tokens(p, n) for p, n in prompts]


def test_prompt_logprobs_equal_transformers_with_prompts_cut_into_chunks(
    server: str, reference: GreedyReference
) -> None:
    prompts = [prompt_of(seed, length) for seed, length in enumerate((700, 33, 2, 200))]
    with ThreadPoolExecutor(len(prompts)) as pool:
        futures = [pool.submit(complete, server, p, 1, echo=True, logprobs=3, prompt_logprobs=0) for p in prompts]
        answers = [future.result()["choices"][0] for future in futures]
    for prompt, answer in zip(prompts, answers, strict=True):
        scores = reference.scores(prompt)
        expected = [scores[at][token] for at, token in enumerate(prompt[1:])]
        found = answer["logprobs"]["token_logprobs"]
        assert len(found) == len(prompt) + 1
        assert found[0] is None
        assert found[1:-1] == pytest.approx(expected, abs=1e-4)
        # What lm-eval and others compute from them.
        assert sum(found[1:-1]) / len(expected) == pytest.approx(sum(expected) / len(expected), abs=1e-4)
        for at, top in enumerate(answer["logprobs"]["top_logprobs"][1:-1]):
            assert sorted(top.values(), reverse=True) == pytest.approx(sorted(scores[at])[:-4:-1], abs=1e-4)
        own = [None if one is None else next(iter(one.values()))["logprob"] for one in answer["prompt_logprobs"]]
        assert own == found[:-1]


def test_a_request_that_would_be_late_is_answered_429_with_a_time_to_retry_if_it_asks_for_that(server: str) -> None:
    def asked(ttft_ms: float, seed: int = 5, **fields: Any) -> httpx.Response:
        slo = {"ttft_ms": ttft_ms, **fields}
        body = {"model": model_of(server), "prompt": prompt_of(seed, 4000), "max_tokens": 2, "slo": slo}
        return httpx.post(f"{server}/v1/completions", json=body, timeout=120)

    name = "headway_requests_refused_late_total"
    before = metric(server, name)
    # Less than 50 ms is taken as 50 ms. Of eight long prompts at once no machine begins all within that.
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: asked(1e-3, seed, refuse_late=True), range(8)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    for late in refused:
        assert late.status_code == 429
        assert 1 <= int(late.headers["retry-after"]) <= 60
        assert "later than" in late.json()["error"]["message"]
    metric_reaches(server, name, lambda value: value == before + len(refused))
    assert asked(1e-3).status_code == 200, "without the wish it is served, late"
    assert asked(1e6, refuse_late=True).status_code == 200
    assert metric(server, name) == before + len(refused)


@LONG
def test_decodes_that_outgrow_the_pool_are_recomputed_and_still_exact(llama: Path, reference: GreedyReference) -> None:
    arguments = [str(llama), "--kv-cache-memory", "384K", "--max-model-len", "512"]
    with ServerProcess(arguments) as running:
        prompts = [prompt_of(seed, 90) for seed in range(10)]
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(lambda p: token_ids(running.url, p, 400, ignore_eos=True), prompts))
        assert metric(running.url, "headway_num_preemptions_total") > 0
    assert answers == [reference.tokens(p, 400) for p in prompts]


def test_a_seeded_draw_does_not_depend_on_the_company(server: str) -> None:
    fields = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "ignore_eos": True}
    alone = token_ids(server, prompt_of(1, 40), 20, **fields)
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(token_ids, server, prompt_of(s, 200), 20, ignore_eos=True) for s in range(5)]
        again = pool.submit(token_ids, server, prompt_of(1, 40), 20, **fields).result()
        for other in others:
            other.result()
    assert again == alone


def test_a_client_that_vanishes_during_prefill_frees_its_work_and_others_go_on(
    server: str, reference: GreedyReference
) -> None:
    leave_after_sending(server, prompt_of(9, 3500), 500)
    assert token_ids(server, prompt_of(2, 30), 8, ignore_eos=True) == reference.tokens(prompt_of(2, 30), 8)
    metric_reaches(server, "headway_num_requests_running", lambda running: running == 0)


def test_requests_that_cannot_be_served_say_why_and_name_the_limit(server: str) -> None:
    long = {"model": model_of(server), "prompt": [5] * 5000, "max_tokens": 4}
    answer = httpx.post(f"{server}/v1/completions", json=long)
    assert answer.status_code == 400
    assert "5000" in answer.json()["error"]["message"]
    assert "4096" in answer.json()["error"]["message"]
    bad = httpx.post(f"{server}/v1/completions", json={**long, "prompt": [5, 999]})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "prompt"


@LONG
def test_a_timed_out_request_ends_with_a_message(llama: Path) -> None:
    with ServerProcess([str(llama), "--request-timeout-s", "0.3"]) as running:
        body = {"model": model_of(running.url), "prompt": prompt_of(0, 50), "max_tokens": 4000, "ignore_eos": True}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 504
        assert token_ids(running.url, prompt_of(0, 5), 3, ignore_eos=True)


@LONG
def test_sigterm_finishes_what_was_accepted_and_refuses_the_rest(llama: Path, reference: GreedyReference) -> None:
    with ServerProcess([str(llama)]) as running:
        events = stream(running.url, prompt_of(4, 64), 500, ignore_eos=True)
        ids = next(events)["choices"][0]["token_ids"]
        assert running._process is not None
        running._process.send_signal(signal.SIGTERM)
        for event in events:
            ids += event["choices"][0]["token_ids"]
        assert ids == reference.tokens(prompt_of(4, 64), 500)
        assert running._process.wait(20) == 0


@LONG
def test_a_dead_engine_without_restarts_fails_all_waiting_clients(llama: Path) -> None:
    with ServerProcess([str(llama), "--max-restarts", "0"]) as running:
        events = stream(running.url, prompt_of(4, 64), 3500, ignore_eos=True)
        next(events)
        assert running._process is not None
        os.kill(engine_pid(running._process.pid), signal.SIGKILL)
        last = [event for event in events if "error" in event]
        assert last
        assert httpx.get(f"{running.url}/health").status_code == 503
        refused = httpx.post(f"{running.url}/v1/completions", json={"model": "x", "prompt": [5], "max_tokens": 1})
        assert refused.status_code in (404, 503)


def test_the_embedded_model_answers_with_the_passkey_it_was_shown() -> None:
    with ServerProcess([]) as running:
        text = "import os\n" * 40 + "The passkey is 40917. Remember it.\n" + "x = 1\n" * 40
        answer = complete(running.url, f"{text}What is the passkey? The passkey is", 12)
        assert answer["choices"][0]["text"].strip() == "40917"
        assert answer["choices"][0]["finish_reason"] == "stop"
        chat = {
            "model": model_of(running.url),
            "messages": [{"role": "user", "content": f"{text}What is the passkey?"}],
        }
        said = httpx.post(f"{running.url}/v1/chat/completions", json={**chat, "temperature": 0}, timeout=60).json()
        assert said["choices"][0]["message"]["content"].strip() == "40917"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-folder"], "neither a folder nor"),
        pytest.param(["--scheduling-policy", "fifo"], "choose one of", marks=LONG),
        pytest.param(["--chunking", "static:none"], "static:N", marks=LONG),
        pytest.param(["--max-model-len", "12parsecs"], "a number of tokens", marks=LONG),
        pytest.param(["--host", "0.0.0.0"], "API key", marks=LONG),
        pytest.param(["--kv-cache-memory", "4K", "--max-model-len", "4096"], "--kv-cache-memory", marks=LONG),
    ],
)
def test_settings_that_cannot_work_end_with_a_sentence(arguments: list[str], words: str) -> None:
    with pytest.raises(ServerError) as caught, ServerProcess(arguments):
        pass
    message = str(caught.value)
    assert "status 2" in message
    assert words in message
    assert "Traceback" not in message
