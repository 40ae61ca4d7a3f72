"""Routes of the live page: its static files, the data that it asks for twice a second, and a request's explanation.

The page asks again and again, with the numbers of what it has, in place of a stream: the answer is bounded, a page that
is closed leaves nothing behind, and a key travels in a header as with every other request. The static files hold no
data and are open; the data is under `/v1`, which the API key guards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from headway.core.errors import ConfigError
from headway.serving.errors import ApiError, json_response

HEADERS = {
    # Nothing inline, nothing from elsewhere: names of requests cannot become scripts.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
PAGE_S = 0.5
"""Shortest time between two times that the page's data is made."""
_LARGEST = 1 << 53
"""Numbers that a page may send: those that JavaScript can count."""


class LivePage(Protocol):
    """Where the page's data comes from."""

    def page(self, after: int, bucket: int, at_s: float | None) -> dict[str, Any]:
        """Return what is new (`LiveFeed.page`). at_s: the log's time to show; None, or a server: now."""

    async def why(self, request_id: str, under: Sequence[str]) -> dict[str, Any]:
        """Return the JSON of `headway why`. Raises ConfigError or ApiError for an unknown request."""


def add_routes(app: FastAPI, live: LivePage) -> None:
    """Add the page and its data to an application."""
    turn = asyncio.Lock()
    newest: tuple[tuple[int, int, float | None], bytes | memoryview, float] | None = None

    async def data(request: Request) -> Response:
        """Samples of iterations after number `after`, the last minutes' latencies from bucket `bucket` on, and the
        requests that wait, run or have ended lately. For `/ui`; its form may change."""
        query = request.query_params
        at_s = float(_number(query.get("at"), "at")) if "at" in query else None
        asked = (int(_number(query.get("after"), "after")), int(_number(query.get("bucket"), "bucket")), at_s)
        # Made at most twice a second, whatever asks: others wait, and what asks for the same shares it.
        async with turn:
            nonlocal newest
            if newest is None or newest[0] != asked or time.monotonic() - newest[2] >= PAGE_S:
                if newest is not None:
                    await asyncio.sleep(max(0.0, newest[2] + PAGE_S - time.monotonic()))
                newest = (asked, json_response(live.page(*asked)).body, time.monotonic())
            return Response(newest[1], media_type="application/json")

    async def why(request: Request) -> Response:
        """The JSON of `headway why`: intervals and causes of its time to first token and of its worst gap. With
        `--event-log` from all of the log, and with `?under=fcfs` simulated otherwise; without from the last minutes."""
        try:
            body = await live.why(request.path_params["request_id"], request.query_params.getlist("under"))
        except ConfigError as error:
            raise ApiError(404, str(error)) from None
        return json_response(body)

    app.add_api_route("/v1/live", data, methods=["GET"], response_model=None, summary="What the live page shows")
    app.add_api_route(
        "/v1/requests/{request_id}/why", why, methods=["GET"], response_model=None, summary="Why a request waited"
    )
    app.add_api_route("/ui", _page, include_in_schema=False, response_model=None)
    app.add_api_route("/ui/", _page, include_in_schema=False, response_model=None)
    app.add_api_route("/ui/{name}", _file, include_in_schema=False, response_model=None)


async def _page(request: Request) -> Response:
    # Relative links of the page need the slash.
    if not request.url.path.endswith("/"):
        return RedirectResponse("ui/", headers=HEADERS)
    return _static("index.html")


async def _file(request: Request) -> Response:
    return _static(request.path_params["name"])


def _static(name: str) -> Response:
    folder = files("headway.serving.live") / "static"
    known = {each.name: each for each in folder.iterdir() if each.is_file()}
    kind = _KINDS.get(name.rpartition(".")[2])
    if name not in known or kind is None:
        raise ApiError(404, f"the live page has no file {name[:100]!r}")
    return Response(known[name].read_bytes(), media_type=kind, headers=HEADERS)


def _number(text: str | None, name: str) -> float:
    """Return a number of a query; 0 without one. Raises ApiError 400."""
    try:
        value = float(text or 0)
        if abs(value) <= _LARGEST:
            return value
    except ValueError:
        pass
    raise ApiError(400, f"{name!r} must be a number, not {str(text)[:40]!r}", name)
