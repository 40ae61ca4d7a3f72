"""What goes wrong in the router itself: the request concerned ends and is told so, nobody is blamed, others go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.router.cluster_clients import ask, prompt, running
from tests.router.fake_instances import FakeCluster, answer

from headway.control.controller import ClusterController
from headway.core.errors import InvariantError
from headway.policy.placement.baselines import FifoPlacement
from headway.runtime.cluster.native_backend import LiveSpanRuns


@pytest.mark.parametrize("where", ["runs", "machine", "letting go"])
async def test_a_controller_error_fails_the_request_and_not_the_instance(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    done, span_done, drop = LiveSpanRuns.done, ClusterController.span_done, ClusterController.drop

    def bad_done(runs: LiveSpanRuns, number: int, attempt: Any, message: Any) -> Any:
        if attempt.request.id.startswith("bad"):
            raise RuntimeError("a bug")
        return done(runs, number, attempt, message)

    def bad_span_done(controller: ClusterController, entry: Any, now: float, over: Any = ()) -> None:
        span_done(controller, entry, now, over)
        if entry.owner.startswith("bad"):
            raise KeyError(entry.owner)

    def bad_drop(controller: ClusterController, controlled: Any, why: str, now: float) -> None:
        drop(controller, controlled, why, now)
        if where == "letting go" and controlled.request.id.startswith("bad"):
            raise RuntimeError("another bug")

    if where == "machine":
        monkeypatch.setattr(ClusterController, "span_done", bad_span_done)
    else:
        monkeypatch.setattr(LiveSpanRuns, "done", bad_done)
        monkeypatch.setattr(ClusterController, "drop", bad_drop)

    fake = FakeCluster(run_s=0.005)
    async with running(fake, ("mixed", "mixed"), "fifo", {"long_tokens": 10, "long_sp": 2}) as client:
        asked = [ask(client, name, prompt(i, 50)) for i, name in enumerate(("good0", "bad", "good1", "good2"))]
        found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10.0)
        assert isinstance(found[1], InvariantError | RuntimeError)
        assert "failed at this request" in str(found[1]) or where == "letting go"
        assert [found[i] for i in (0, 2, 3)] == [answer(prompt(i, 50), 4) for i in (0, 2, 3)]
        assert [each.state for each in client.registry] == ["ready", "ready"]
        assert client.stats.engine_restarts_total == 0
    assert "the controller has failed at a message about bad#1" in caplog.text


async def test_a_policy_whose_next_wakeup_raises_is_still_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(policy: FifoPlacement, now: float) -> float | None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(FifoPlacement, "next_wakeup", fails)

    fake = FakeCluster()
    async with running(fake, ("mixed", "mixed"), "fifo", {"long_tokens": 10, "long_sp": 2}) as client:
        assert await ask(client, "a", prompt(0, 50)) == answer(prompt(0, 50), 4)


async def test_an_error_while_settling_is_attributed_to_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settle, calls = ClusterController.settle, 0

    def sometimes(controller: ClusterController, now: float) -> float | None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyError("somebody's")
        return settle(controller, now)

    monkeypatch.setattr(ClusterController, "settle", sometimes)

    fake = FakeCluster(run_s=0.005)
    async with running(fake, ("mixed", "mixed"), "fifo", {"long_tokens": 10, "long_sp": 2}) as client:
        asked = [ask(client, str(i), prompt(i, 50)) for i in range(4)]
        found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10.0)
        assert found == [answer(prompt(i, 50), 4) for i in range(4)]
    assert "the controller has failed at the consequences" in caplog.text


@pytest.mark.parametrize("where", ["arrive", "sent"])
async def test_a_request_that_cannot_be_placed_blocks_no_other(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    real = getattr(ClusterController, where)

    def fails(controller: ClusterController, what: Any, *more: Any) -> Any:
        if str(getattr(what, "id", None) or getattr(what, "request", None)).startswith("bad"):
            raise RuntimeError("a bug")
        return real(controller, what, *more)

    monkeypatch.setattr(ClusterController, where, fails)

    fake = FakeCluster(run_s=0.005)
    async with running(fake, ("prefill", "decode"), "tetris") as client:
        names = ("good0", "bad", "good1", "good2")
        asked = [ask(client, name, prompt(i, 50)) for i, name in enumerate(names)]
        found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10.0)
        assert isinstance(found[1], InvariantError)
        assert [found[i] for i in (0, 2, 3)] == [answer(prompt(i, 50), 4) for i in (0, 2, 3)]
