"""A plain HTTP client for tests against real server processes."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
from tests.helpers.polling import until


def complete(url: str, prompt: list[int] | str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """One greedy completion, not streamed; raises on any HTTP error, with what the server says of it."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **fields}
    body.setdefault("model", model_of(url))
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    if answer.is_error:
        raise httpx.HTTPStatusError(answer.text, request=answer.request, response=answer)
    result: dict[str, Any] = answer.json()
    return result


def token_ids(url: str, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
    ids: list[int] = complete(url, prompt, max_tokens, **fields)["choices"][0]["token_ids"]
    return ids


def model_of(url: str) -> str:
    name: str = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    return name


def stream(url: str, prompt: list[int] | str, max_tokens: int, **fields: Any) -> Iterator[dict[str, Any]]:
    """Events of a streamed greedy completion, until [DONE]."""
    body = {"model": model_of(url), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"return_token_ids": True, **fields}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def streamed_ids(url: str, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
    ids: list[int] = []
    for event in stream(url, prompt, max_tokens, **fields):
        assert "error" not in event, event
        for choice in event["choices"]:
            ids += choice.get("token_ids") or []
    return ids


def leave_after_sending(url: str, prompt: list[int], max_tokens: int) -> None:
    """Send a request on a raw connection and hang up at once, as a vanishing client does."""
    body = json.dumps(
        {"model": model_of(url), "prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    ).encode()
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        # On a loaded machine a scrape may take longer than the request runs: then its answer has begun.
        until(
            lambda: metric(url, "headway_num_requests_running") >= 1 or select.select([connection], [], [], 0)[0],
            what="the request does not run",
        )


def metric(url: str, name: str) -> float:
    """The value of a metric (the sum over its labels)."""
    lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
    assert values, f"no metric {name}"
    return sum(values)


def metric_reaches(url: str, name: str, reached: Any, timeout_s: float = 30.0) -> float:
    """Poll until `reached(value)`; fails the test after `timeout_s`."""
    values: list[float] = []

    def now() -> object:
        values.append(metric(url, name))
        return reached(values[-1])

    until(now, timeout_s, f"{name} is not there")
    return values[-1]
