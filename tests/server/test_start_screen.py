"""What an operator sees: the banner of a start, the status line under load, and the page at /."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import re
import shlex
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.helpers.fake_engine import INFO, FakeEngine
from tests.helpers.polling import eventually, run_ready_tasks
from tests.server.fake_cluster import FakeClusterEngine

from headway.runtime.engine.protocol import EngineStats
from headway.serving.app import create_app
from headway.serving.metrics import ServerMetrics, StatusLine
from headway.serving.run import banner
from headway.serving.settings import ServerSettings
from headway.serving.tokenizer import ModelTokenizer

pytestmark = pytest.mark.anyio


def shown(tokenizer: ModelTokenizer, **settings: Any) -> str:
    info = replace(
        INFO, processor="Xeon 9", kernels="compiled kernels for bf16", profile="measured in 25 s", kv_bytes=8192 * 16,
        parameters=12_300_000,
    )  # fmt: skip
    engine = FakeEngine(state="ready", info_value=info)
    context = create_app(engine, tokenizer, ServerSettings(**settings)).state.headway
    return banner(context, "http://127.0.0.1:8000")


async def test_the_banner_says_what_runs(tokenizer: ModelTokenizer) -> None:
    text = shown(tokenizer, served_model_name=("m",))
    for line in (
        "Headway serves m at http://127.0.0.1:8000",
        "engine               native",
        "architecture         fake, 12.3 M parameters, float32 on cpu",
        "processor            Xeon 9, compiled kernels for bf16",
        "KV cache             0.1 MiB for 8,192 tokens (16 bytes a token), in blocks of 16",
        "longest context      4,096 tokens, output included",
        "policy               fcfs, fixed chunks, default mode, iterations of 100 ms beside decodes",
        "latency from         measured in 25 s",
    ):
        assert line in text.splitlines()
    assert "/v1/chat/completions -H" in text


async def test_the_banner_of_a_cluster_names_its_placement_and_roles(tokenizer: ModelTokenizer) -> None:
    context = create_app(FakeClusterEngine(state="ready"), tokenizer, ServerSettings()).state.headway
    lines = banner(context, "http://127.0.0.1:8000").splitlines()
    assert "engine               native, 2 instances" in lines
    assert "placement            tetris on 1 prefill, 1 decode" in lines


async def test_the_example_is_a_completion_without_a_template_and_never_shows_the_key() -> None:
    text = shown(ModelTokenizer.none(), api_key="hunter2")
    assert "/v1/completions" in text
    assert '"prompt": [1, 2, 3]' in text
    assert "hunter2" not in text
    assert "Bearer $HEADWAY_API_KEY" in text


def test_a_status_line_has_the_rates_of_its_interval_and_is_silent_when_idle() -> None:
    engine = FakeEngine(state="ready")
    metrics = ServerMetrics(engine, "m")
    line = StatusLine(engine, metrics)
    assert line.fields(10.0) is None
    engine.stats = EngineStats(
        running=2, waiting=1, prefill_tokens_total=5000, decode_tokens_total=120, kv_tokens_used=25, kv_tokens_total=100
    )
    metrics.classes.met_total, metrics.classes.missed_total = 3, 1
    assert line.fields(10.0) == {
        "running": 2, "waiting": 1, "prefill_tok_s": 500, "decode_tok_s": 12, "kv": "25%", "slo": "75%"
    }  # fmt: skip
    # The same counters again: nothing was computed, two requests still run.
    assert line.fields(10.0) == {"running": 2, "waiting": 1, "prefill_tok_s": 0, "decode_tok_s": 0, "kv": "25%"}
    engine.stats = EngineStats(prefill_tokens_total=5000, decode_tokens_total=120)
    assert line.fields(10.0) is None


async def test_status_lines_are_logged_while_there_is_work(
    connect: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:

    logging.getLogger("headway.server").propagate = True
    engine.stats = EngineStats(running=1)
    with caplog.at_level(logging.INFO, "headway.server"):
        async with connect(status_every_s=0.01):
            await eventually(lambda: any(each.message == "status" for each in caplog.records))
        caplog.clear()
        async with connect(status_every_s=0):
            await run_ready_tasks()
    assert not any(each.message == "status" for each in caplog.records)


async def test_the_page_at_the_root_links_what_there_is_and_loads_nothing(connect: Any) -> None:
    async with connect(served_model_name=("<m>",)) as client:
        reply = await client.get("/")
        assert reply.status_code == 200
        assert reply.headers["content-security-policy"].startswith("default-src 'none'")
        links = re.findall(r'href="([^"]+)"', reply.text)
        assert {"metrics", "health"} <= set(links)
        for link in links:
            assert (await client.get(f"/{link}")).status_code == 200
    assert "&lt;m&gt;" in reply.text
    assert "<m>" not in reply.text
    assert not re.search(r"<link|<img|@import|url\(", reply.text)
    (script,) = re.findall(r"<script>(.*?)</script>", reply.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in reply.headers["content-security-policy"]


async def test_the_button_sends_the_example_and_is_absent_where_a_key_is_needed(connect: Any) -> None:
    async with connect() as client:
        page = (await client.get("/")).text
        path, body = re.findall(r'data-path="([^"]+)" data-body="([^"]+)"', page)[0]
        reply = await client.post(f"/{path}", content=html.unescape(body))
        assert reply.status_code == 200, reply.text
    async with connect(api_key="k") as client:
        assert "<button" not in (await client.get("/")).text


def test_a_server_prints_its_banner_once_it_listens(tmp_path: Path) -> None:
    import os
    import signal
    import subprocess
    import sys

    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")}
    command = [sys.executable, "-m", "headway.cli.main", "serve", "--port", "0", "--kv-cache-memory", "16M"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    lines: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line.rstrip("\n"))
        if line.startswith("    -d "):
            break
    # The command that it prints is one that the embedded model answers rightly.
    curl = shlex.split(" ".join(one.rstrip("\\") for one in lines[-2:]))
    request = urllib.request.Request(curl[1], curl[-1].encode(), {"content-type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert answer["choices"][0]["message"]["content"].strip() == "84213"
    assert any(re.match(r"Headway serves headway-embedded at http://127\.0\.0\.1:\d+$", line) for line in lines)
    assert any(line.startswith("curl http://127.0.0.1:") for line in lines)
    # Without a terminal no progress bar is drawn.
    assert "\x1b" not in "".join(lines)
