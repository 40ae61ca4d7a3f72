"""Routes of the live page: its static files, the data that it asks for twice a second, and a request's explanation; and
the application that shows the page of a log.

The page asks again and again, with the numbers of what it has, in place of a stream: the answer is bounded, a page that
is closed leaves nothing behind, and a key travels in a header as with every other request. The static files hold no
data and are open; the data is under `/v1`, which the API key guards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from typing_extensions import override

from headway.core.errors import ConfigError, HeadwayError
from headway.serving.access import AccessControl, AuthMiddleware
from headway.serving.errors import ApiError, as_api_error, error_response, json_response
from headway.serving.settings import ServerSettings, bind, release, url

if TYPE_CHECKING:
    from headway.serving.live.recordings import RecordedRun

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
        wanted = (int(_number(query.get("after"), "after")), int(_number(query.get("bucket"), "bucket")), at_s)
        # Made at most twice a second, whatever asks: others wait, and what asks for the same shares it.
        async with turn:
            nonlocal newest
            if newest is None or newest[0] != wanted or time.monotonic() - newest[2] >= PAGE_S:
                if newest is not None:
                    await asyncio.sleep(max(0.0, newest[2] + PAGE_S - time.monotonic()))
                newest = (wanted, json_response(live.page(*wanted)).body, time.monotonic())
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


# The page of a recorded run, served on loopback and shown as of any of its times.


class LogPlayer(LivePage):
    """The `LivePage` of a recording. title: shown in the page's head."""

    def __init__(self, recording: RecordedRun, title: str) -> None:
        """Raises ConfigError for a run in which nothing happened."""
        self._recording, self._title = recording, title
        self._happenings = sorted(recording.happenings(), key=lambda one: one[0])
        if not self._happenings:
            raise ConfigError(f"{title} says of no request and no iteration: there is nothing to show")
        self.span = (self._happenings[0][0], self._happenings[-1][0])
        self._rewinds, self._at_s = 0, self.span[0]
        self._rewind()

    @override
    def page(self, after: int, bucket: int, at_s: float | None) -> dict[str, Any]:
        """An earlier time than the last one begins anew; `epoch` then differs."""
        at_s = self.span[0] if at_s is None else min(max(at_s, self.span[0]), self.span[1])
        if at_s < self._at_s:
            self._rewinds += 1
            self._rewind()
        while self._place < len(self._happenings) and self._happenings[self._place][0] <= at_s:
            self._happenings[self._place][1](self._feed)
            self._place += 1
        self._at_s = at_s
        self._feed.assess(self._recording.assess)
        body = self._feed.page(at_s, after, bucket)
        return {**body, "title": self._title, "state": "log", "span": self.span, "epoch": self._rewinds}

    @override
    async def why(self, request_id: str, under: Sequence[str]) -> dict[str, Any]:
        from headway.sim.report.why import why_json  # brings numpy, which a server does without

        return why_json(*self._recording.why(request_id, under))

    def _rewind(self) -> None:
        self._feed = self._recording.new_feed()
        self._place, self._at_s = 0, self.span[0]


_HOST = "127.0.0.1"
_SETTINGS: dict[str, Any] = {"host": _HOST}


def create_app(live: LivePage) -> FastAPI:
    """Make the application. Pages of other sites are refused, as by a server without a key."""
    app = FastAPI(title="Headway", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(AuthMiddleware, access=AccessControl(ServerSettings(**_SETTINGS)))
    app.add_exception_handler(HeadwayError, _on_error)
    add_routes(app, live)
    app.add_api_route("/", _home, include_in_schema=False, response_model=None)
    return app


def serve(recording: RecordedRun, title: str, port: int) -> None:
    """Show a recording until interrupted. Raises ConfigError for a port that cannot be had, and an empty run."""
    import uvicorn

    app = create_app(LogPlayer(recording, title))
    sockets = bind(_HOST, port)
    try:
        print(f"{url(_HOST, sockets[0])}/ui/ shows {title} (Ctrl-C ends it)", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False)).run(sockets)
    finally:
        release(sockets)


async def _home(request: Request) -> Response:
    return RedirectResponse("ui/")


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))
