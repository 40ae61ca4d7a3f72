"""The live page in a real browser: loads, updates, opens a request's explanation, asks for the key, fits two widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from scripts.headless_browser import Browser, browser, missing_browser
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.live_feeds import log_page

from headway.runtime.engine.protocol import ChunkSample, EngineSamples, IterationSample

pytestmark = [
    pytest.mark.long,
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(missing_browser() is not None, reason=str(missing_browser())),
]
WIDTHS = (1280, 400)
UPDATES = "return Number(document.body.dataset.updates || 0)"
OVERFLOW = "return document.documentElement.scrollWidth - innerWidth"
PAINTED = """
const shown = document.getElementById("lanes"), copy = new OffscreenCanvas(shown.width, shown.height);
const context = copy.getContext("2d", {willReadFrequently: true});
context.drawImage(shown, 0, 0);
const {data} = context.getImageData(0, 0, copy.width, copy.height), colours = new Set();
for (let i = 0; i < data.length; i += 4)
  if (data[i + 3] === 255) colours.add(data[i] + " " + data[i + 1] + " " + data[i + 2]);
return colours.size > 3;
"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module", name="log_page")
def _log_page() -> Iterator[str]:
    with log_page() as address:
        yield address


@pytest.mark.parametrize("width", WIDTHS)
def test_a_log_plays_and_a_click_explains_a_request(tab: Browser, log_page: str, width: int) -> None:
    tab.open(log_page, width)
    before = tab.wait(UPDATES)
    tab.wait(f"return Number(document.body.dataset.updates) > {before + 1}")
    tab.wait("return document.querySelectorAll('#recent .row').length > 2")
    assert tab.wait(PAINTED)
    assert tab.run("return document.querySelectorAll('#charts canvas').length") == 4
    assert tab.run("return document.getElementById('title').textContent") == "convoy.jsonl"
    tab.run("document.querySelector('#recent .row').click()")
    text = tab.wait("return document.querySelector('#why .strip') && document.getElementById('why').innerText")
    assert "First token after" in text
    assert "its own prefill" in text
    assert tab.run("return document.querySelectorAll('#why .strip i').length") >= 1
    assert tab.run(OVERFLOW) <= 0
    tab.run("document.getElementById('close').click()")
    assert tab.run("return document.getElementById('why').hidden")
    assert tab.complaints() == []


def test_a_log_can_be_moved_back_and_stopped(tab: Browser, log_page: str) -> None:
    tab.open(log_page, 1280)
    tab.wait("return document.querySelectorAll('#recent .row').length > 2")
    tab.run(
        "document.getElementById('play').click(); const seek = document.getElementById('seek');"
        "seek.value = 0; seek.dispatchEvent(new Event('input'))"
    )
    tab.wait("return document.querySelectorAll('#recent .row').length === 0")
    assert tab.run("return document.getElementById('clock').textContent").startswith("0.0")
    assert tab.run("return document.getElementById('play').textContent") == "Play"
    assert tab.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_server_shows_what_runs_now_once_it_has_the_key(tab: Browser, live: Callable[..., Any], width: int) -> None:
    class Sampled(FakeEngine):
        def on_samples(self, receive: Any) -> None:
            self.receive = receive

    engine = Sampled()
    with live(engine, api_key="secret") as url:
        tab.open(f"{url}/ui/", width)
        tab.wait("return !document.getElementById('login').hidden")
        assert tab.run("return document.querySelectorAll('.row').length") == 0
        tab.complaints()  # the browser notes the refusal itself
        tab.run("document.getElementById('key').value = 'secret'; document.querySelector('#login button').click()")
        tab.wait(UPDATES)
        body = {"model": "fake-model", "prompt": [5, 6, 7], "max_tokens": 5}
        headers = {"Authorization": "Bearer secret", "x-request-id": "<b>", "x-llm-d-slo-ttft-ms": "1000"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        name = tab.wait("const row = document.querySelector('#recent .row'); return row && row.dataset.id")
        assert name.startswith("b#")
        now = httpx.get(f"{url}/v1/live", headers=headers).json()["now_s"]
        chunk = ChunkSample("a-long-prompt", 0, 500, 100_000, "time")
        engine.receive(0, EngineSamples((IterationSample(0, 0, now, now, now + 0.5, 0.4, 3, (chunk,)),)))
        tab.wait("return document.getElementById('legend').textContent.includes('a-long-prompt')")
        assert tab.wait(PAINTED)
        tab.run("document.querySelector('#recent .row').click()")
        tab.wait("return document.querySelector('#why .strip')")
        assert tab.run(OVERFLOW) <= 0
        assert tab.complaints() == []
