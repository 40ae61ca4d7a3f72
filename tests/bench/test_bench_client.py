from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from headway.core.machine import free_port
from headway.serving.load.client import (
    LoadClient,
    LoadRequest,
    LoadResult,
    TargetEndpoint,
    error_message,
    request_body,
    run_requests,
)
from headway.serving.load.prompts import PromptPool, vocab_size_of
from headway.sim.metrics import RequestRecord, SloTargets
from headway.sim.workload import TraceRequest

Start = Callable[..., str]


def job(
    number: int = 0, prompt: bytes = b"[5,6,7]", output: int = 4, due_s: float = 0.0, **more: object
) -> LoadRequest:
    return LoadRequest(id=f"r{number}", prompt=prompt, prompt_tokens=3, output_tokens=output, due_s=due_s, **more)


async def sent(client: LoadClient, jobs: Sequence[LoadRequest]) -> LoadResult:
    """Send jobs as they are, each when it is due."""
    requests = [TraceRequest(one.due_s, one.prompt_tokens, one.output_tokens) for one in jobs]
    return await run_requests(client, requests, lambda request: b"", lambda number, *_: jobs[number])


def send(url: str, *jobs: LoadRequest, **options: object) -> list[RequestRecord]:
    async def run() -> list[RequestRecord]:
        async with LoadClient(TargetEndpoint(base_url=url, model="fake", **options)) as client:
            return (await sent(client, jobs)).records

    return asyncio.run(run())


def seen(url: str) -> list[dict]:
    with urllib.request.urlopen(f"{url}/requests") as response:
        return json.load(response)


def test_a_request_is_streamed_and_timed(serve_fake: Start) -> None:
    url = serve_fake("--gap", "0.02", "--speed", "100")
    (got,) = send(url, job(slo=SloTargets(ttft_s=0.5, tbt_s=0.1), due_s=0.05), send_slo=True, api_key="secret")
    assert got.ok
    assert got.output_tokens == len(got.token_s) == 4
    assert got.finish_reason == "length"
    assert got.token_s[0] - got.arrival_s >= 0.03
    assert min(b - a for a, b in zip(got.token_s, got.token_s[1:], strict=False)) > 0.01
    assert got.sent_s is not None
    assert 0.05 <= got.sent_s < 0.3
    headers = seen(url)[0]["headers"]
    assert headers["x-llm-d-slo-ttft-ms"] == "500"
    assert headers["x-llm-d-slo-tpot-ms"] == "100"
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-request-id"] == "r0"


def test_several_tokens_in_a_chunk_share_their_time(serve_fake: Start) -> None:
    (got,) = send(serve_fake("--chunk-tokens", "3", "--gap", "0.02"), job(output=6))
    assert len(got.token_s) == 6
    assert len(set(got.token_s)) == 2


def test_the_load_is_open_loop(serve_fake: Start) -> None:
    url = serve_fake("--chunking", "whole", "--speed", "30")  # a tenth of a second each, one at a time
    got = send(url, *(job(i, due_s=i * 0.01) for i in range(8)))
    assert all(one.ok for one in got)
    assert all(one.sent_s is not None and one.sent_s - one.arrival_s < 0.08 for one in got)
    assert got[-1].token_s[0] > 0.7


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("cut", ("ClientPayloadError", "stream ended early")), ("error-event", ("error event: worker lost",))],
)
def test_broken_streams_end_as_records(serve_fake: Start, mode: str, reason: tuple[str, ...]) -> None:
    (got,) = send(serve_fake("--mode", mode), job())
    assert got.error is not None
    assert got.error.startswith(reason)
    assert len(got.token_s) == 2


def test_refusals_timeouts_and_dead_servers_end_as_records(serve_fake: Start) -> None:
    url = serve_fake("--mode", "refuse")
    assert [one.error for one in send(url, job(0), job(1, due_s=0.1))] == [None, "HTTP 429: the queue is full"]
    (late,) = send(serve_fake("--speed", "1"), job(), timeout_s=0.2)
    assert late.error == "timeout: no end within 0.2 s"
    (dead,) = send(f"http://127.0.0.1:{free_port()}", job())
    assert dead.error is not None
    assert dead.error.startswith("ClientConnectorError: ")


def test_a_stopped_run_still_has_a_record_for_each_request(serve_fake: Start) -> None:
    url = serve_fake("--speed", "1")

    async def run() -> tuple[list[RequestRecord], bool]:
        async with LoadClient(TargetEndpoint(base_url=url, model="fake")) as client:
            task = asyncio.create_task(sent(client, [job(i, due_s=i * 0.2) for i in range(4)]))
            await asyncio.sleep(0.3)
            task.cancel()
            result = await task
            return result.records, result.interrupted

    records, interrupted = asyncio.run(run())
    assert interrupted
    assert [(one.error or "").split(":")[0] for one in records] == ["cancelled", "cancelled", "not sent", "not sent"]


def test_a_million_ids_are_sent_as_they_are(serve_fake: Start) -> None:
    pool = PromptPool(np.random.default_rng(0), 4096, 1_000_000)
    url = serve_fake("--speed", "1e9")
    (got,) = send(url, LoadRequest(id="m", prompt=pool.json(1_000_000), prompt_tokens=1_000_000, output_tokens=1))
    assert got.ok, got.error
    assert got.prompt_tokens == 1_000_000


def test_bodies_hold_the_prompt_and_only_openai_fields_when_asked() -> None:
    body = json.loads(request_body(TargetEndpoint(base_url="http://127.0.0.1:9", model="m"), job()))
    assert body["prompt"] == [5, 6, 7]
    assert (body["ignore_eos"], body["min_tokens"], body["max_tokens"]) == (True, 4, 4)
    plain = json.loads(request_body(TargetEndpoint(base_url="http://127.0.0.1:9", model="m", extensions=False), job()))
    assert plain.keys() == {"model", "max_tokens", "temperature", "stream", "stream_options", "prompt"}
    assert TargetEndpoint(base_url="http://h:1/v1/", model="m").path("models") == "http://h:1/v1/models"


def test_errors_are_read_out_of_any_body() -> None:
    bodies = (b'{"error":{"message":"no"}}', b'{"detail":"x"}', b"<html>", b'{"error":"s"}', b"[1]")
    assert [error_message(body) for body in bodies] == ["no", "x", "<html>", "s", "[1]"]


def test_prompts_are_valid_and_seeded_and_share_no_prefix(tmp_path) -> None:  # type: ignore[no-untyped-def]
    def pool() -> PromptPool:
        return PromptPool(np.random.default_rng(1), 500, 3000)

    first, second = pool(), pool()
    one = json.loads(first.json(3000))
    assert len(one) == 3000
    assert all(3 <= token < 500 for token in one)
    assert one == json.loads(second.json(3000))
    assert one[:4] != json.loads(first.json(3000))[:4]
    with pytest.raises(ValueError, match="longer than this pool"):
        PromptPool(np.random.default_rng(1), 500, 10).json(2_000_000)
    (tmp_path / "config.json").write_text('{"vocab_size": 77}')
    assert vocab_size_of(str(tmp_path)) == 77
    assert vocab_size_of("nowhere") is None
