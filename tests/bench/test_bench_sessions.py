from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.bench.conftest import headway_bench

from headway.core.errors import ConfigError
from headway.serving.load.client import LoadClient, LoadRequest, TargetEndpoint, run_requests
from headway.serving.load.prompts import PromptPool, TextPrompts
from headway.sim.metrics import RequestRecord
from headway.sim.workload import TraceRequest, transforms
from headway.sim.workload.generate import PoissonArrivals
from headway.sim.workload.traces import read_trace, shared_tokens

Start = Callable[..., str]
ROWS = (
    # conversation, seconds, prompt, answer, cached prefix, think time
    ("a", 0, 200, 16, 0, ""),
    ("b", 1, 90, 8, 0, ""),
    ("a", 2, 320, 16, 200, 0.01),
    ("a", 3, 500, 4, 320, 0.02),
    ("b", 4, 300, 4, 90, 0.01),
)


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    file = tmp_path / "agents.csv"
    header = "conv,t_s,input_tokens,output_tokens,cached_prefix_tokens,think_time_s"
    file.write_text("\n".join([header, *(",".join(map(str, row)) for row in ROWS)]) + "\n")
    return file


def sessions_of(file: Path) -> list[TraceRequest]:
    requests = read_trace(file, "agents").requests
    return transforms.close_sessions(requests, PoissonArrivals(50.0), np.random.default_rng(0))


def a_pool() -> PromptPool:
    return PromptPool(np.random.default_rng(0), 1000, 500)


def a_job(number: int, request: TraceRequest, prompt: bytes, due_s: float) -> LoadRequest:
    return LoadRequest(
        id=f"r{number}", prompt=prompt, prompt_tokens=request.prompt_tokens, output_tokens=request.output_tokens,
        due_s=due_s, answer_ids=[],
    )  # fmt: skip


def test_the_endpoint_hits_what_the_sessions_share(
    serve_fake: Start, agents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "o.json"
    url = serve_fake("--speed", "1e6", "--gap", "0", "--cache")
    words = ("--url", url, "--trace", f"{agents}:agents", "--sessions", "2", "--session-rate", "50")
    assert headway_bench(*words, "--json", str(file)) == 0
    rows = json.loads(file.read_text())["requests"]
    shared = shared_tokens(sessions_of(agents), 16)
    assert sum(row["cached_tokens"] for row in rows) == shared == 208 + 336 + 96
    assert sorted(row["class"] for row in rows) == ["first"] * 2 + ["later"] * 3
    said = capsys.readouterr()
    assert "3.0 s of the trace's time" in " ".join(said.err.split())
    assert f"cached by `usage`: {shared:,} of 1,410 prompt tokens" in " ".join(said.out.split())


def test_an_endpoint_that_reports_no_hits_is_named(
    serve_fake: Start, agents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve_fake("--speed", "1e6", "--gap", "0")
    words = ("--url", url, "--trace", f"{agents}:agents", "--sessions", "1", "--turns", "2", "--think", "0")
    assert headway_bench(*words) == 0
    assert "the endpoint does not say" in " ".join(capsys.readouterr().out.split())


def test_a_turn_waits_for_the_answer_before_it_and_its_think_time(serve_fake: Start, agents: Path) -> None:
    requests = sessions_of(agents)

    async def play(url: str) -> list[RequestRecord]:
        prompts = TextPrompts(a_pool())
        async with LoadClient(TargetEndpoint(base_url=url, model="fake")) as client:
            return (await run_requests(client, requests, prompts.prompt, a_job, prompts.answered)).records

    records = asyncio.run(play(serve_fake("--speed", "1e5", "--gap", "0")))
    assert all(record.ok for record in records)
    ended: dict[str | None, float] = {}
    for request, record in zip(requests, records, strict=True):
        assert record.sent_s is not None
        assert record.finish_s is not None
        if request.waits:
            assert record.arrival_s >= ended[request.session] + (request.think_s or 0.0)
            assert record.sent_s >= record.arrival_s - 1e-3
        ended[request.session] = record.finish_s


def test_a_stopped_run_sends_no_further_turn(agents: Path) -> None:
    requests = sessions_of(agents)

    class Slow:
        """A client whose requests end only when they are cancelled, as `LoadClient.send` records it."""

        def __init__(self) -> None:
            self.sent: list[str] = []

        def restart_clock(self) -> None: ...

        def now(self) -> float:
            return 1e6

        async def send(self, job: LoadRequest) -> RequestRecord:
            self.sent.append(job.id)
            with contextlib.suppress(asyncio.CancelledError):
                if len(self.sent) <= 2:
                    await asyncio.Event().wait()
            why = "cancelled: the run was stopped"
            return RequestRecord(id=job.id, klass="", arrival_s=0.0, prompt_tokens=job.prompt_tokens, error=why)

    async def stopped() -> tuple[Slow, list[RequestRecord], bool]:
        slow = Slow()
        task = asyncio.create_task(run_requests(slow, requests, TextPrompts(a_pool()).prompt, a_job))
        while len(slow.sent) < 2:
            await asyncio.sleep(0)
        task.cancel()
        result = await task
        return slow, result.records, result.interrupted

    slow, records, interrupted = asyncio.run(stopped())
    assert interrupted
    assert len(slow.sent) == 2
    assert [record.id for record in records] == [f"r{n}" for n in range(5)]
    assert not any(record.ok for record in records)


def test_prompts_repeat_the_answer_that_was_given(agents: Path) -> None:
    first, second, third = (request for request in sessions_of(agents) if request.session == "a")
    prompts = TextPrompts(a_pool())
    one = json.loads(prompts.prompt(first))
    prompts.answered(first, [5] * 16)
    two = json.loads(prompts.prompt(second))
    prompts.answered(second, [6] * 16)
    three = json.loads(prompts.prompt(third))
    assert [len(one), len(two), len(three)] == [200, 320, 500]
    assert two[:216] == one + [5] * 16
    assert three[:336] == two + [6] * 16


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--sessions", "0"), "above 0"),
        (("--sessions", "1", "--think", "-1"), "0 or more"),
        (("--sessions", "1", "--slice", "0:2"), "not with --slice"),
        (("--sessions", "1", "--rate", "2"), "not with --rate"),
        (("--sessions", "1", "--max-prompt-tokens", "50"), "every session"),
    ],
)
def test_impossible_sessions_are_refused_in_one_sentence(agents: Path, words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        headway_bench("--url", "http://127.0.0.1:9", "--trace", f"{agents}:agents", *words)


def test_a_trace_without_sessions_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,2\n")
    with pytest.raises(ConfigError, match="needs a trace of agents"):
        headway_bench("--url", "http://127.0.0.1:9", "--trace", str(file), "--sessions", "1")
