"""Queries of a running server: its models, and JSON of its other paths."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from headway.core.errors import ConfigError


def server_root(base_url: str) -> str:
    """Return a server's address without a final /v1. Raises ConfigError for anything but http:// and https://."""
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"{base_url!r} is not an address of a server: write it like http://127.0.0.1:8000")
    return base_url.rstrip("/").removesuffix("/v1")


def ask(
    method: str, url: str, api_key: str | None, body: dict[str, Any] | None = None, timeout_s: float | None = None
) -> dict[str, Any]:
    """Return a server's answer to a request. Raises ConfigError with the server's own words where it refuses.

    timeout_s: silence of the server after which it counts as not answering; None: never."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as refusal:
        raise ConfigError(_reason(refusal, url)) from None
    except (OSError, HTTPException, ValueError) as problem:
        raise ConfigError(f"{url} does not answer ({problem}); is a server there?") from None


def _reason(refusal: urllib.error.HTTPError, url: str) -> str:
    try:
        return f"the server refuses it: {json.load(refusal)['error']['message']}"
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return f"the server answers {refusal.code} {refusal.reason} to {url}: it is none of this version"


def first_model(base_url: str, api_key: str | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
    """Return the first entry of /v1/models; its `id` is the name to send. Raises ConfigError when there is none."""
    url = f"{server_root(base_url)}/v1/models"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            entries = json.load(response)["data"]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(
            f"{url} does not answer with a list of models ({problem}); is a server there? Or name --model"
        ) from None
    if not entries or not isinstance(entries[0], dict) or "id" not in entries[0]:
        raise ConfigError(f"{url} lists no model; name one with --model")
    return dict(entries[0])
