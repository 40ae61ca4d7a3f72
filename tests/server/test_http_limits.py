"""Limits of sizes and load, API keys, latency targets, request ids."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import product
from typing import Any

import msgspec
import pytest
from tests.helpers.asgi_driver import Caller
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.polling import eventually

from headway.core.errors import ConfigError
from headway.core.request import Slo
from headway.runtime.engine.protocol import EngineStats
from headway.serving.settings import ServerSettings, check_binding

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY: dict[str, Any] = {"model": "fake-model", "prompt": [2, 3], "max_tokens": 2}


async def test_large_body_is_refused_unread(application: Any, engine: FakeEngine) -> None:
    async with application(max_body_bytes=1000) as app:
        announced = Caller(app, PATH, b"{", {"content-length": "1001"})
        await announced.done()
        assert announced.status == 413
        assert json.loads(announced.received)["error"]["code"] == 413
        assert b"1000 bytes" in announced.received
        unannounced = Caller(app, PATH, b" " * 1001)
        await unannounced.done()
        assert unannounced.status == 413
        fits = Caller(app, PATH, json.dumps(BODY).encode().ljust(1000))
        await fits.done()
        assert fits.status == 200


async def test_bodies_together_are_bounded(application: Any) -> None:
    async with application(max_buffered_bytes=500) as app:
        call = Caller(app, PATH, b" " * 501)
        await call.done()
        assert call.status == 429
        again = Caller(app, PATH, BODY)
        await again.done()
        assert again.status == 200


async def test_compressed_bodies_are_refused(connect: Any) -> None:
    async with connect() as client:
        answer = await client.post(PATH, content=b"x", headers={"content-encoding": "gzip"})
    assert answer.status_code == 415


async def test_a_million_token_ids(connect: Any, engine: FakeEngine) -> None:
    million = 1_000_000
    room = {"max_model_len": 2 * million, "kv_tokens_total": 2 * million}
    engine.info_value = msgspec.structs.replace(engine.info_value, **room)
    prompt = [number % 500 for number in range(million)]
    async with connect() as client:
        answer = await client.post(PATH, json={**BODY, "prompt": prompt})
    assert answer.json()["usage"]["prompt_tokens"] == million
    assert engine.prompts[0] == prompt


async def test_a_text_of_many_thousand_tokens_is_served(connect: Any, engine: FakeEngine) -> None:
    engine.info_value = msgspec.structs.replace(engine.info_value, max_model_len=10**6, kv_tokens_total=10**6)
    async with connect() as client:
        answer = await client.post(PATH, json={**BODY, "prompt": "hello world " * 10_000})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] > 10_000


async def test_flood_gets_429_and_the_rest_is_served(application: Any, engine: FakeEngine) -> None:
    engine.hold = asyncio.Event()
    async with application(max_concurrent_requests=3) as app:
        calls = [Caller(app, PATH, BODY) for _ in range(3)]
        await eventually(lambda: len(engine.running) == 3)
        refused = [Caller(app, PATH, {**BODY, "stream": bool(number % 2)}) for number in range(20)]
        for call in refused:
            await call.done()
            assert call.status == 429
            assert b"requests are in flight" in call.received
        engine.hold.set()
        for call in calls:
            await call.done()
            assert call.status == 200
        again = Caller(app, PATH, BODY)
        await again.done()
        assert again.status == 200


async def test_a_full_queue_is_429_with_a_time_to_retry(connect: Any, engine: FakeEngine) -> None:
    engine.stats = EngineStats(waiting=5)
    async with connect(max_queued_requests=5) as client:
        answer = await client.post(PATH, json=BODY)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"


async def test_half_a_body_holds_no_slot(application: Any, engine: FakeEngine) -> None:
    engine.hold = asyncio.Event()
    async with application(max_concurrent_requests=2, body_timeout_s=0.5) as app:
        halves = [Caller(app, PATH, b"") for _ in range(6)]
        for half in halves:
            half._body.clear()
        await eventually(lambda: app.state.headway.bodies._held == 0 and app.state.headway.active._tasks)
        assert app.state.headway.in_flight == 0
        whole = Caller(app, PATH, BODY)
        await eventually(lambda: len(engine.running) == 1)
        engine.hold.set()
        await whole.done()
        assert whole.status == 200
        for half in halves:
            await half.done()
            assert half.status == 408


async def test_one_of_several_keys_leaves_half_of_the_slots(connect: Any, engine: FakeEngine) -> None:
    engine.hold = asyncio.Event()
    keys = [{"authorization": f"Bearer {key}"} for key in ("one", "two")]
    async with connect(max_concurrent_requests=4, api_key="one,two") as client:
        first = [asyncio.create_task(client.post(PATH, json=BODY, headers=keys[0])) for _ in range(2)]
        await eventually(lambda: len(engine.running) == 2)
        refused = await client.post(PATH, json=BODY, headers=keys[0])
        assert refused.status_code == 429
        assert "of this key" in refused.json()["error"]["message"]
        assert (await client.get("/ready")).status_code == 200
        second = [asyncio.create_task(client.post(PATH, json=BODY, headers=keys[1])) for _ in range(2)]
        await eventually(lambda: len(engine.running) == 4)
        # All slots are held: a load balancer should send no more.
        ready = await client.get("/ready")
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        assert "which is the limit" in ready.json()["error"]["message"]
        engine.hold.set()
        assert [(await each).status_code for each in (*first, *second)] == [200] * 4
        assert not client._transport.app.state.headway.in_flight_of


async def test_not_ready_is_503(connect: Any, engine: FakeEngine) -> None:
    async with connect(start_engine=False) as client:
        for state in ("starting", "draining", "lost"):
            engine.state = state
            for answer in (
                await client.post(PATH, json=BODY),
                await client.get("/ready"),
                await client.get("/v1/models"),
            ):
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["type"] == "ServiceUnavailableError"
            assert (await client.get("/health")).status_code == (503 if state == "lost" else 200)
            assert (await client.get("/metrics")).status_code == 200


async def test_requests_wait_and_readiness_fails_while_workers_restart(connect: Any, engine: FakeEngine) -> None:
    async with connect() as client:
        engine.state = "recovering"
        engine.stats = EngineStats(recoveries_total=2, lost_tokens_total=70, engine_restarts_total=1)
        assert (await client.post(PATH, json=BODY)).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        assert "start again" in ready.json()["error"]["message"]
        health = await client.get("/health")
        assert health.status_code == 200
        assert health.json() == {"status": "recovering", "recoveries": 2, "engine_restarts": 1}
        shown = (await client.get("/metrics")).text
        for line in ("recoveries_total", "lost_tokens_total", "engine_restarts_total"):
            assert f"headway_{line}{{" in shown
        assert re.search(r"headway_engine_up\{[^}]*\} 0\.0", shown)


async def test_requests_without_the_api_key_are_refused(connect: Any) -> None:
    async with connect(api_key="secret") as client:
        for given in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret"},
            {"authorization": "Bearer \xff"},
        ):
            headers = {key: value.encode("latin-1") for key, value in given.items()}
            for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize"):
                answer = await client.post(path, json=BODY, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["type"] == "AuthenticationError"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["x-request-id"]
        right = {"authorization": "Bearer secret"}
        assert (await client.post(PATH, json=BODY, headers=right)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200


def test_all_addresses_but_loopback_need_a_key() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.0.1"):
        check_binding(host, None)
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.org", ""):
        with pytest.raises(ConfigError, match="API key"):
            check_binding(host, None)
        check_binding(host, "key")
        check_binding(host, None, force=True)


CANONICAL, ALIAS = {"x-llm-d-slo-ttft-ms": "300"}, {"x-slo-ttft-ms": "700"}
SLOS = [
    ({}, None, Slo()),
    ({}, {"ttft_ms": 900, "tpot_ms": 40}, Slo(ttft_s=0.9, tbt_s=0.04)),
    (ALIAS, {"ttft_ms": 900, "tpot_ms": 40}, Slo(ttft_s=0.7, tbt_s=0.04)),
    ({**ALIAS, **CANONICAL}, {"ttft_ms": 900}, Slo(ttft_s=0.3)),
    ({"x-llm-d-slo-tpot-ms": "25.5", "x-slo-tpot-ms": "99"}, None, Slo(tbt_s=0.0255)),
    ({"x-slo-ttft-ms": "0.001", "x-slo-tpot-ms": "0.001"}, None, Slo(ttft_s=0.1, tbt_s=0.02)),
    (ALIAS, {"refuse_late": True}, Slo(ttft_s=0.7, refuse_late=True)),
    ({**ALIAS, "x-slo-refuse-late": "true"}, {"refuse_late": False}, Slo(ttft_s=0.7, refuse_late=True)),
    ({"x-slo-ttft-ms": "1e9", "x-slo-tpot-ms": "1e9"}, None, Slo(ttft_s=60.0, tbt_s=2.0)),
]


async def test_latency_targets_come_from_headers_and_body_within_the_limits(connect: Any, engine: FakeEngine) -> None:
    limits = {"slo_min_ttft_s": 0.1, "slo_max_ttft_s": 60.0, "slo_min_tbt_s": 0.02, "slo_max_tbt_s": 2.0}
    async with connect(**limits) as client:
        for headers, body, expected in SLOS:
            assert (await client.post(PATH, json={**BODY, "slo": body}, headers=headers)).status_code == 200
            assert engine.submits[-1].slo == expected, (headers, body)


async def test_a_latency_target_in_a_header_that_is_no_number_is_refused(connect: Any) -> None:
    names = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
    async with connect() as client:
        for name, value in product(names, ("", "fast", "0", "-5", "nan", "inf", "1e99", "5ms")):
            answer = await client.post(PATH, json=BODY, headers={name: value})
            assert answer.status_code == 400, (name, value)
            assert answer.json()["error"]["param"] == name


async def test_request_ids_are_kept_and_made_safe(connect: Any, engine: FakeEngine) -> None:
    async with connect() as client:
        for given, expected in [("abc-1.2:3_4", "abc-1.2:3_4"), ("a b<c>/\u00e9", "abc"), ("x" * 500, "x" * 128)]:
            headers = {"x-request-id": given.encode("latin-1")}
            answer = await client.post(PATH, json=BODY, headers=headers)
            assert answer.headers["x-request-id"] == expected
            assert answer.json()["id"] == f"cmpl-{expected}"
        for headers in ({}, {"x-request-id": b"  "}):
            assert re.fullmatch("[0-9a-f]{32}", (await client.get("/health", headers=headers)).headers["x-request-id"])
        for _ in range(2):
            await client.post(PATH, json=BODY, headers={"x-request-id": "twice"})
    ids = [submit.id for submit in engine.submits]
    assert len(set(ids)) == len(ids)
    assert ids[-1].startswith("twice")


@pytest.mark.parametrize(
    "bad",
    [
        {"max_body_bytes": 0}, {"port": 70000}, {"keep_alive_s": 0}, {"request_timeout_s": -1.0}, {"log_level": "loud"},
        {"api_key": " "}, {"max_n": 2}, {"log_format": "xml"},
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ServerSettings(**bad)


def test_every_setting_has_help() -> None:
    assert all(len(field.description or "") > 10 for field in ServerSettings.model_fields.values())
