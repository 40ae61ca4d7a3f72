"""The live page over HTTP: its files and their policy, its data behind the key, explanations, and the flag."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.live_feeds import logged_events, sampled_feed

from headway.runtime.engine.protocol import ChunkSample, EngineSamples, IterationSample
from headway.serving.live import pages
from headway.serving.live.pages import LogPlayer, create_app
from headway.serving.live.recordings import EngineRecording
from headway.sim.replay import replay

pytestmark = pytest.mark.anyio
STATIC = Path(pages.__file__).parent / "static"
KEY = {"Authorization": "Bearer secret"}
BODY = {"model": "fake-model", "prompt": [5, 6, 7], "max_tokens": 4}


class SampledFake(FakeEngine):
    """A fake engine that reports samples when it is told to."""

    def on_samples(self, receive: Any) -> None:
        self.receive = receive


@pytest.fixture
def engine() -> FakeEngine:
    return SampledFake()


async def test_the_page_loads_nothing_inline_and_nothing_from_elsewhere(connect: Any) -> None:
    async with connect() as client:
        page = await client.get("/ui", follow_redirects=True)
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert len(named) >= 5
        for name in named:
            assert (await client.get(f"/ui/{name}")).status_code == 200
        assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", page.text)
        for name in ("nothing.js", "uPlot.LICENSE.txt", "..%2Ffeed.py"):
            assert (await client.get(f"/ui/{name}")).status_code == 404


def test_our_scripts_name_no_host_and_make_no_markup() -> None:
    for path in STATIC.glob("*.js"):
        if not path.name.startswith("uPlot"):
            assert not re.search(r"https?://|innerHTML|eval\(", path.read_text()), path.name
    assert "MIT" in (STATIC / "uPlot.LICENSE.txt").read_text()


async def test_the_data_needs_the_key_and_the_page_does_not(connect: Any) -> None:
    async with connect(api_key="secret") as client:
        assert (await client.get("/ui/")).status_code == 200
        for path in ("/v1/live", "/v1/requests/r/why"):
            assert (await client.get(path)).status_code == 401
        assert (await client.get("/v1/live", headers=KEY)).status_code == 200
    async with connect() as client:
        elsewhere = {"Origin": "http://example.com"}
        assert (await client.get("/v1/live", headers=elsewhere)).status_code == 403


async def test_the_flag_turns_it_off(connect: Any, engine: SampledFake) -> None:
    async with connect(live_page=False) as client:
        for path in ("/ui/", "/v1/live", "/v1/requests/r/why"):
            assert (await client.get(path)).status_code == 404
        assert "/ui/" not in (await client.get("/")).text
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert not hasattr(engine, "receive")


async def test_a_request_is_followed_from_its_arrival_to_its_end(connect: Any, engine: SampledFake) -> None:
    engine.hold = asyncio.Event()
    async with connect() as client:
        headers = {"x-llm-d-slo-ttft-ms": "60000", "x-request-id": "mine"}
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY, headers=headers))
        while not engine.running:
            await asyncio.sleep(0.001)
        told = (await client.get("/v1/live")).json()
        (row,) = told["requests"]
        assert row["id"].startswith("mine#")
        assert (told["waiting"], told["running"], row["ttft_s"]) == (1, 0, None)
        assert row["due_s"] == pytest.approx(row["arrival_s"] + 60.0)
        chunk = ChunkSample(row["id"], 0, 3, 3, "rest of the prompt")
        end_s = told["now_s"] + 0.01
        engine.receive(
            0, EngineSamples((IterationSample(0, 0, told["now_s"], told["now_s"], end_s, 0.01, 0, (chunk,)),))
        )
        engine.hold.set()
        assert (await asked).status_code == 200
        told = (await client.get(f"/v1/live?after={told['cursor']}")).json()
        (row,) = told["requests"]
        assert (row["output"], row["reason"], row["met"], told["met"]) == (4, "length", True, 1)
        assert [block[-1][0][0] for block in told["blocks"]] == [row["id"]]
        why = (await client.get("/v1/requests/mine/why")).json()
        assert why["ttft_s"] == pytest.approx(row["ttft_s"])
        assert sum(one["seconds"] for one in why["intervals"]) == pytest.approx(why["ttft_s"], abs=1e-3)
        assert (await client.get("/v1/requests/other/why")).status_code == 404
        assert "--event-log" in (await client.get("/v1/requests/mine/why?under=fcfs")).json()["error"]["message"]


async def test_numbers_that_are_none_are_refused(connect: Any) -> None:
    async with connect() as client:
        for query in ("after=x", "bucket=nan", "at=1e99"):
            assert (await client.get(f"/v1/live?{query}")).status_code == 400


async def test_with_an_event_log_the_log_explains_and_simulates(
    connect: Any, engine: SampledFake, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\n".join(msgspec.json.encode(event) for event in logged_events()))
    async with connect(event_log=str(log)) as client:
        why = (await client.get("/v1/requests/r3/why?under=fcfs")).json()
        assert [one["setting"] for one in why["counterfactuals"]] == ["as it ran", "fcfs"]
        assert (await client.get("/v1/requests/r99/why")).status_code == 404


async def test_a_log_is_shown_as_of_any_time_and_back_again() -> None:
    events = logged_events()
    player = LogPlayer(EngineRecording(replay(events, detail=True)), "log")
    start, end = player.span
    assert player.page(0, 0, None)["now_s"] == start
    whole = player.page(0, 0, end)
    assert (whole["waiting"], whole["running"]) == (0, 0)
    assert {row["id"] for row in whole["requests"]} == {f"r{i}" for i in range(13)}
    middle = player.page(0, 0, 0.4)
    assert middle["epoch"] == whole["epoch"] + 1
    assert all(block[4] <= 0.4 for block in middle["blocks"])
    early = next(row for row in middle["requests"] if row["id"] == "r0")
    assert 0 < early["computed"] < 30_000
    assert early["due_s"] > early["work_s"] > 0
    assert middle["instances"][0]["kv_used"] > 0
    _, run = sampled_feed(events)
    assert (await player.why("r3", ()))["ttft_s"] == pytest.approx(
        next(one.token_s[0] - one.arrival_s for one in run.records if one.id == "r3")
    )


async def test_the_page_of_a_log_is_the_same_page() -> None:
    import httpx

    app = create_app(LogPlayer(EngineRecording(replay(logged_events(), detail=True)), "log"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert "live.js" in (await client.get("/", follow_redirects=True)).text
        assert (await client.get("/v1/live?at=1")).json()["title"] == "log"
        assert (await client.get("/v1/requests/r3/why?under=fcfs")).json()["counterfactuals"]
        assert (await client.get("/v1/requests/none/why")).status_code == 404
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://example.com") as client:
        assert (await client.get("/v1/live")).status_code == 403
