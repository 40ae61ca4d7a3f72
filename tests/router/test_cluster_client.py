"""A cluster as one engine: what its clients and operators see."""

from __future__ import annotations

import asyncio

import pytest
from tests.helpers.polling import eventually, run_ready_tasks
from tests.router import virtual_time
from tests.router.cluster_clients import SHAPE, all_quiet, ask, prompt, router, running
from tests.router.fake_instances import FakeCluster, answer

from headway.core.errors import ConfigError, OverloadedError, RequestError, UnavailableError
from headway.core.request import Slo, cut
from headway.runtime.cluster.instances import MOST_RUNS_LOST, InstanceLoad
from headway.runtime.engine.protocol import (
    ComputeSpan,
    EngineStats,
    MeetPeers,
    PauseRequest,
    ResumeSpan,
    SpanTaskLost,
    SubmitRequest,
)


async def test_requests_join_the_shorter_queue_in_seconds() -> None:
    fake = FakeCluster(run_s=0.2)
    async with running(fake, ("mixed", "mixed"), "jsq") as client:
        asks = [asyncio.create_task(ask(client, "long", prompt(0, 500)))]
        await run_ready_tasks(1)
        for number in range(3):
            asks.append(asyncio.create_task(ask(client, f"s{number}", prompt(1, 3))))
            await run_ready_tasks(1)
        await asyncio.gather(*asks)
        at = {message.id: number for number, message in fake.log if isinstance(message, SubmitRequest)}
        assert at == {"long#1": 0, "s0#1": 1, "s1#1": 1, "s2#1": 1}


async def test_priorities_deadlines_and_limits_reach_the_instance() -> None:
    fake = FakeCluster()
    async with running(fake, ("mixed",), "jsq") as client:
        await ask(client, "a", prompt(0, 9), slo=Slo(ttft_s=1.0, tbt_s=0.1), priority=-3, timeout_s=60.0)
        (submit,) = fake.said(SubmitRequest)
        assert (submit.slo, submit.priority) == (Slo(ttft_s=1.0, tbt_s=0.1), -3)
        assert submit.timeout_s is None, "the router keeps time for all attempts"


async def test_a_client_that_leaves_frees_its_work_everywhere() -> None:
    fake = FakeCluster(run_s=0.05, token_s=0.01)
    async with running(fake, ("prefill", "prefill", "decode"), "fixed-sp", {"sp": 2}) as client:
        for at_s in (0.01, 0.06, 0.1):  # while it is computed, handed over, decoded
            gone = asyncio.create_task(ask(client, "gone", prompt(0, 200), 50))
            await virtual_time.pause(at_s)
            with pytest.raises(RequestError, match="in use"):
                await ask(client, "gone", prompt(0, 3))
            gone.cancel()
            await all_quiet(client, fake)
            assert await ask(client, "next", prompt(1, 40)) == answer(prompt(1, 40), 4)


async def test_a_request_that_is_out_of_time_ends() -> None:
    fake = FakeCluster(run_s=10.0)
    async with running(fake, ("mixed", "mixed"), "fifo", {"long_tokens": 10}) as client:
        late = asyncio.create_task(ask(client, "late", prompt(0, 50), timeout_s=0.05))
        assert await asyncio.wait_for(late, 2) == []
        assert fake.said(ComputeSpan)


@pytest.mark.parametrize("placement", ["jsq", "fixed-sp"])
async def test_the_queue_is_bounded_and_rejections_have_a_retry_time(placement: str) -> None:
    fake = FakeCluster(run_s=10.0, kv_tokens=1000)
    async with running(fake, ("mixed", "mixed"), placement) as client:
        most = client.info.max_queued_requests
        asks = [asyncio.create_task(ask(client, f"r{n}", prompt(n, 5), 1)) for n in range(most)]
        await run_ready_tasks(1)
        await run_ready_tasks(1)
        with pytest.raises(OverloadedError, match="waiting") as full:
            await ask(client, "more", prompt(0, 5))
        assert full.value.retry_after_s >= 1.0
        for each in asks:
            each.cancel()
        with pytest.raises(RequestError, match=f"hold requests of up to {client.info.max_model_len}"):
            await ask(client, "large", prompt(0, client.info.max_model_len - 10), 20)


async def test_the_bound_is_that_of_the_instances_that_are_in_the_cluster() -> None:
    fake = FakeCluster(run_s=10.0)
    async with running(fake, ("mixed", "mixed"), "jsq") as client:
        client.leave(1)
        asks = [asyncio.create_task(ask(client, f"r{n}", prompt(n, 5), 1)) for n in range(128)]
        await virtual_time.pause(0.01)
        with pytest.raises(OverloadedError, match="128 requests are waiting"):
            await ask(client, "more", prompt(0, 5))
        await eventually(lambda: len(client.report().instances) == 1)
        client.join(0)
        await eventually(lambda: client.report().instances[1].state == "ready")
        asks.append(asyncio.create_task(ask(client, "more", prompt(0, 5))))
        await virtual_time.pause(0.01)
        assert not asks[-1].done()
        for each in asks:
            each.cancel()


async def test_a_long_run_pauses_for_a_short_one() -> None:
    fake = FakeCluster(run_s=0.03)
    async with running(fake, ("prefill", "decode"), "pecsched", {"long_tokens": 100}) as client:
        long = asyncio.create_task(ask(client, "long", prompt(0, 400)))
        await eventually(lambda: fake.said(ComputeSpan))
        assert client._live is not None
        (entry,) = client._live.controller.requests["long#1"].entries
        assert await ask(client, "short", prompt(1, 20)) == answer(prompt(1, 20), 4)
        assert await long == answer(prompt(0, 400), 4)
        edges = cut(0, 400, 1, 32)
        assert (entry.tokens, entry.layer) == (edges[len(edges) // 2][0], 1)
        assert entry.share == pytest.approx((len(edges) // 2 + 1 / SHAPE.layers) / len(edges), rel=0.2)
        assert len(fake.said(PauseRequest)) == 1
        assert len(fake.said(ResumeSpan)) == len(fake.said(ComputeSpan)) == 1


async def test_a_lost_span_is_retried_after_a_pause_a_limited_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:

    fake = FakeCluster(run_s=0.001)
    async with running(fake, ("mixed", "mixed"), "fifo", {"long_tokens": 10, "long_sp": 2}) as client:
        lost = 3

        def loses(process: object, message: ComputeSpan) -> None:
            nonlocal lost
            if lost:
                lost -= 1
                process._say(SpanTaskLost(message.id, "no room"))  # type: ignore[attr-defined]
            else:
                whole(process, message)

        whole = type(fake.processes[0])._compute
        monkeypatch.setattr(type(fake.processes[0]), "_compute", loses)
        assert await ask(client, "a", prompt(0, 50)) == answer(prompt(0, 50), 4)
        assert {message.id for message in fake.said(ComputeSpan)} == {"a#1", "a#2", "a#3"}
        lost = 10**6
        with pytest.raises(UnavailableError, match=f"lost {MOST_RUNS_LOST} times"):
            await ask(client, "b", prompt(0, 50))


async def test_a_late_loss_report_of_a_continued_decode_is_ignored() -> None:
    fake = FakeCluster(run_s=0.2)
    async with running(fake, ("mixed", "mixed"), "jsq") as client:
        asked = asyncio.create_task(ask(client, "a", prompt(0, 300)))
        await eventually(lambda: fake.said(SubmitRequest))
        for process in fake.processes.values():
            process._say(SpanTaskLost("a#1", "what it had of a movement that nobody waits for"))
        assert await asked == answer(prompt(0, 300), 4)
        assert [message.id for message in fake.said(SubmitRequest)] == ["a#1"]


async def test_a_request_that_loses_instance_after_instance_fails_and_others_continue() -> None:
    fake = FakeCluster(run_s=0.2)
    async with running(fake, ("mixed",) * 3, "jsq") as client:
        poison = asyncio.create_task(ask(client, "poison", prompt(0, 300)))
        for losses in range(21):
            await eventually(lambda: len(fake.said(SubmitRequest)) > losses)  # noqa: B023
            (at,) = (number for number, process in fake.processes.items() if process.scheduled)
            fake.kill(at)
        with pytest.raises(UnavailableError, match="21 instances were lost with the request on them"):
            await poison
        assert client.stats.lost_tokens_total == 21 * 300
        assert await ask(client, "next", prompt(1, 20)) == answer(prompt(1, 20), 4)


async def test_a_joining_instance_needs_the_kv_room_of_its_pool() -> None:
    fake = FakeCluster()
    async with running(fake, ("mixed", "mixed"), "jsq") as client:
        fake.longest[2] = client.info.max_model_len - 1
        client.join(0)
        await eventually(lambda: client.report().instances[2].state == "failed")
        assert "and this cluster's instances 8192 at least" in (client.report().instances[2].failure or "")
        assert fake.kv_bytes == [1001]
        assert await ask(client, "a", prompt(0, 30)) == answer(prompt(0, 30), 4)


async def test_instances_join_drain_and_leave_while_serving(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    fake = FakeCluster(run_s=0.005, token_s=0.002, kv_tokens=1 << 20)
    async with running(fake, ("mixed", "mixed"), "fifo", {"long_tokens": 100, "long_sp": 2}) as client:
        asks = [asyncio.create_task(ask(client, f"a{n}", prompt(n, 30 + 200 * (n % 2)), 20)) for n in range(6)]
        await virtual_time.pause(0.004)
        assert client.join(0).state == "starting"
        with pytest.raises(RequestError, match="pool 0"):
            client.join(1)
        await eventually(lambda: client.report().instances[2].state == "ready")
        assert {peer.instance for peer in fake.said(MeetPeers)[-1].peers} == {0, 1, 2}
        asks += [asyncio.create_task(ask(client, f"b{n}", prompt(n, 60), 20)) for n in range(6)]
        await eventually(lambda: client.report().instances[2].placed)
        assert client.leave(0).state == "draining"
        assert client.leave(0).state == "draining"
        asks += [asyncio.create_task(ask(client, f"c{n}", prompt(n, 300), 5)) for n in range(3)]
        answers = await asyncio.gather(*asks)
        wanted = [answer(prompt(n, 30 + 200 * (n % 2)), 20) for n in range(6)]
        wanted += [answer(prompt(n, 60), 20) for n in range(6)] + [answer(prompt(n, 300), 5) for n in range(3)]
        assert answers == wanted
        assert not any(name.startswith("c") for number, name in begun(fake) if number == 0)
        await eventually(lambda: [each.id for each in client.report().instances] == [1, 2])
        client.leave(1)
        await eventually(lambda: len(client.report().instances) == 1)
        with pytest.raises(RequestError, match="cannot leave: without it no instance is there"):
            client.leave(2)
        assert client.join(0).id == 0
        await eventually(lambda: client.report().instances[0].state == "ready")
        assert client.report().instances[0].incarnation == 1
        assert await ask(client, "d", prompt(3, 300)) == answer(prompt(3, 300), 4)
    said = [record.getMessage() for record in caplog.records]
    assert [line for line in said if "is ready" in line or "has left" in line or "is lost" in line] == [
        "instance 2 is ready", "instance 0 has left", "instance 1 has left", "instance 0 is ready",
    ]  # fmt: skip


def begun(fake: FakeCluster) -> list[tuple[int, str]]:
    return [(number, message.id) for number, message in fake.log if isinstance(message, SubmitRequest | ComputeSpan)]


async def test_requests_wait_for_an_instance_and_fail_when_none_will_come() -> None:
    fake = FakeCluster(token_s=0.002, start_s=0.02)
    client = router(fake, ("mixed",), "jsq")
    await client.start()
    said = asyncio.create_task(ask(client, "a", prompt(0, 20), 30))
    await eventually(
        lambda: client._live is not None and client._live.requests.asked and client._live.requests.asked["a"].told
    )
    fake.kill(0)
    await eventually(lambda: client.state == "recovering")
    waits = asyncio.create_task(ask(client, "b", prompt(1, 20)))
    assert await said == answer(prompt(0, 20), 30)
    assert await waits == answer(prompt(1, 20), 4)
    assert client.state == "ready"
    assert client.stats.engine_restarts_total == 1
    fake.refuse = lambda number, serial: "the disk is gone"
    last = asyncio.create_task(ask(client, "c", prompt(0, 20), 10_000))
    with pytest.raises(RequestError, match="hold requests of up to 8192"):
        await last
    last = asyncio.create_task(ask(client, "c", prompt(0, 20), 5000))
    await eventually(lambda: client._live is not None and "c" in client._live.requests.asked)
    fake.kill(0)
    with pytest.raises(UnavailableError, match="no instance is left"):
        await asyncio.wait_for(last, 5)
    assert client.state == "lost"
    with pytest.raises(UnavailableError, match="no instance is left"):
        await ask(client, "d", prompt(0, 20))
    assert "the disk is gone" in (client.report().instances[0].failure or "")
    await client.close()


async def test_output_sent_by_an_earlier_router_is_not_sent_again() -> None:
    fake = FakeCluster()
    async with running(fake, ("prefill", "decode"), "fixed-sp", {"sp": 1}) as client:
        ids = prompt(0, 50)
        known = tuple(answer(ids, 3))
        said = await ask(client, "a", ids, 10, output=known, resubmitted=True)
        assert [*known, *said] == answer(ids, 10)


async def test_draining_finishes_what_was_accepted_and_takes_nothing_new() -> None:
    fake = FakeCluster(run_s=0.01)
    async with running(fake, ("prefill", "decode"), "fixed-sp", {"sp": 1}) as client:
        asks = [asyncio.create_task(ask(client, f"a{n}", prompt(n, 20))) for n in range(3)]
        await run_ready_tasks(1)
        drained = asyncio.create_task(client.drain())
        await run_ready_tasks(1)
        with pytest.raises(UnavailableError, match="draining"):
            await ask(client, "late", prompt(0, 3))
        assert await asyncio.gather(*asks) == [answer(prompt(n, 20), 4) for n in range(3)]
        await asyncio.wait_for(drained, 5)


async def test_a_cluster_fails_to_start_when_instances_differ_or_cannot_start() -> None:
    fake = FakeCluster(refuse=lambda number, serial: "no such model" if number else None)
    client = router(fake, ("mixed", "mixed"), "jsq")
    with pytest.raises(ConfigError, match="no such model"):
        await client.start()
    assert client.failure == "instance 1: no such model"
    assert client.state == "lost"
    await client.close()
    client = router(FakeCluster(), ("prefill", "prefill"), "pecsched")
    with pytest.raises(ConfigError, match="pecsched keeps short decodes apart"):
        await client.start()
    await client.close()


async def test_a_policy_that_fails_takes_neither_router_nor_instances_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.policy.placement.baselines import FifoPlacement

    fake = FakeCluster(run_s=0.001)
    async with running(fake, ("mixed", "mixed"), "fifo", {"long_tokens": 10, "long_sp": 2}) as client:
        failures = 2

        def fails(policy: FifoPlacement, event: object, view: object) -> object:
            nonlocal failures
            if failures and type(event).__name__ == "SpanDone":
                failures -= 1
                raise KeyError("nobody knows")
            return whole(policy, event, view)

        whole = FifoPlacement.on_event
        monkeypatch.setattr(FifoPlacement, "on_event", fails)
        assert await ask(client, "a", prompt(0, 50)) == answer(prompt(0, 50), 4)
        failures = 10**6
        with pytest.raises(UnavailableError, match="lost 16 times"):
            await ask(client, "b", prompt(0, 50), 100)
        assert client.state == "ready"


def test_prefill_progress_is_spread_over_the_waiting_prompts() -> None:
    load = InstanceLoad()
    load.take(EngineStats(prefill_tokens_total=1000))
    load.add("a", 300, 3.0)
    load.add("b", 100, 1.0)
    assert (load.queued, load.left_s) == (400, 4.0)
    load.take(EngineStats(prefill_tokens_total=1200))
    load.take(EngineStats(prefill_tokens_total=1200))
    assert (load.queued, load.left_s) == (200, 2.0)
    load.take(EngineStats(prefill_tokens_total=9200, run_tokens_total=8000))
    assert (load.queued, load.left_s) == (200, 2.0), "shares of runs are none of the waiting prompts'"
    load.first_token("b")
    assert (load.queued, load.left_s) == (200, 2.0)
    load.remove("a")
    assert (load.queued, load.left_s) == (0, 0.0)
