"""The live page of a log as a server of its own, on loopback."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from headway.core.errors import HeadwayError
from headway.serving.access_control import AccessControl
from headway.serving.auth_middleware import AuthMiddleware
from headway.serving.binding import bind, release, url
from headway.serving.errors import as_api_error, error_response
from headway.serving.live.log_player import LogPlayer, RecordedRun
from headway.serving.live.pages import LivePage, add_routes
from headway.serving.settings import ServerSettings

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
