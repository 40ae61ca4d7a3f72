"""SLO headers reach the scheduler in the request's body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from headway.core.request import Slo
from headway.vllm.middleware import SloMiddleware, add_arguments, read_slo


def call(headers: dict[bytes, bytes], parts: list[bytes]) -> tuple[list[MutableMapping[str, Any]], dict[str, Any]]:
    """What is sent to the client, and what the application saw."""
    sent: list[MutableMapping[str, Any]] = []
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        seen.update(body=body, headers=dict(scope["headers"]), after=await receive())
        await send({"type": "http.response.start", "status": 200})

    messages = [{"type": "http.request", "body": p, "more_body": i < len(parts) - 1} for i, p in enumerate(parts)]
    messages.append({"type": "http.disconnect"})

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "headers": list(headers.items())}
    asyncio.run(SloMiddleware(app)(scope, receive, send))
    return sent, seen


def test_headers_become_arguments_of_the_body() -> None:
    headers = {b"x-llm-d-slo-ttft-ms": b"750", b"x-slo-tpot-ms": b"40", b"content-length": b"30"}
    _, seen = call(headers, [b' {"prompt": "a b', b' c", "n": 1}'])
    body = json.loads(seen["body"])
    assert body == {"prompt": "a b c", "n": 1, "vllm_xargs": {"slo_ttft_ms": 750.0, "slo_tpot_ms": 40.0}}
    assert int(seen["headers"][b"content-length"]) == len(seen["body"])
    assert seen["after"] == {"type": "http.disconnect"}
    assert read_slo(body["vllm_xargs"]) == Slo(ttft_s=0.75, tbt_s=0.04)


def test_requests_without_the_headers_pass_untouched() -> None:
    _, seen = call({b"content-length": b"2"}, [b"{}"])
    assert seen["body"] == b"{}"
    assert seen["headers"] == {b"content-length": b"2"}


@pytest.mark.parametrize("value", [b"soon", b"-1", b"0", b"nan", b"inf"])
def test_a_header_that_is_no_time_is_refused(value: bytes) -> None:
    sent, seen = call({b"x-llm-d-slo-ttft-ms": value}, [b"{}"])
    assert sent[0]["status"] == 400
    assert b"x-llm-d-slo-ttft-ms" in sent[1]["body"]
    assert not seen


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{}", {"vllm_xargs": {"slo_ttft_ms": 5.0}}),
        (b'{"vllm_xargs": null}', {"vllm_xargs": {"slo_ttft_ms": 5.0}}),
        (b'{"vllm_xargs": {"slo_ttft_ms": 9, "k": 1}, "n": 2}', {"vllm_xargs": {"slo_ttft_ms": 5.0, "k": 1}, "n": 2}),
        (b'{"prompt": "say \\"vllm_xargs\\""}', {"prompt": 'say "vllm_xargs"', "vllm_xargs": {"slo_ttft_ms": 5.0}}),
    ],
)
def test_arguments_are_merged_with_the_clients_own(body: bytes, expected: object) -> None:
    assert json.loads(add_arguments(body, {"slo_ttft_ms": 5.0})) == expected


@pytest.mark.parametrize("body", [b"", b"[1]", b"text", b'{"vllm_xargs"', b'["vllm_xargs"]'])
def test_what_is_not_an_object_is_left_for_the_server_to_refuse(body: bytes) -> None:
    assert add_arguments(body, {"slo_ttft_ms": 5.0}) == body


def test_values_that_are_no_times_are_no_slo() -> None:
    assert read_slo({"slo_ttft_ms": "abc", "slo_tpot_ms": [1]}) == Slo()
    assert read_slo(None) == Slo()
