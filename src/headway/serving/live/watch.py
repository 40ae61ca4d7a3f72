"""The live page of a log: a recorded run of an engine or of a cluster, served on loopback and shown as of any of its
times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from typing_extensions import override

from headway.core.errors import ConfigError, HeadwayError
from headway.serving.access import AccessControl, AuthMiddleware
from headway.serving.errors import as_api_error, error_response
from headway.serving.live.pages import LivePage, add_routes
from headway.serving.live.recordings import RecordedRun
from headway.serving.settings import ServerSettings, bind, release, url
from headway.sim.report.why import why_json


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
