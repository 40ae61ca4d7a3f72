"""Endpoints for operators: models, health, readiness, version, metrics."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import OverloadedError, UnavailableError
from headway.runtime.engine.protocol import EngineInfo
from headway.serving.context import context
from headway.serving.errors import ApiError, as_api_error, error_response, json_response

router = APIRouter()
# The API wants a creation time of the model; its files' times are not known here.
_STARTED = int(time.time())


@router.get("/v1/models", response_model=None, summary="The model, under each name it is served by")
async def models(request: Request) -> Response:
    """`max_model_len` tells clients how long prompt and answer may be together."""
    server = context(request)
    info = server.info()
    return json_response({"object": "list", "data": [_model(name, info) for name in server.models()]})


@router.get("/v1/models/{name:path}", response_model=None, summary="The model under one of its names")
async def model(request: Request) -> Response:
    """404 for a name that it does not have. Names may hold slashes."""
    server = context(request)
    name: str = request.path_params["name"]
    if name not in server.models():
        raise ApiError(404, f"the model {name[:200]!r} does not exist here; this server has {server.models()[0]!r}")
    return json_response(_model(name, server.info()))


def _model(name: str, info: EngineInfo) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": _STARTED, "owned_by": "headway", "root": info.model,
        "parent": None, "max_model_len": info.max_model_len,
    }  # fmt: skip


@router.get("/health", response_model=None, summary="Live: 503 only when the engine is lost for good")
async def health(request: Request) -> Response:
    """For a liveness probe: while starting, recovering or draining the process is well. `recoveries` counts losses of
    workers, `engine_restarts` those of the engine's own process, since the server started."""
    engine = context(request).engine
    stats = engine.stats
    content = {
        "status": engine.state,
        "recoveries": stats.recoveries_total,
        "engine_restarts": stats.engine_restarts_total,
    }
    # Draining and recovering are not failures: a restart by the probe would lose accepted requests.
    return json_response(content, 503 if engine.state == "lost" else 200)


@router.get("/ready", response_model=None, summary="Ready: 200 when new requests are taken, 503 otherwise")
async def ready(request: Request) -> Response:
    """For a readiness probe or a load balancer. While workers or the engine start again it says so: requests that come
    all the same wait until they have. While a full disk or a full queue refuses new requests it says which."""
    try:
        server = context(request)
        server.info()
        if server.engine.state == "recovering":
            raise UnavailableError("workers are lost and start again; what was accepted goes on afterwards", 1.0)
        server.check_room(None)
    except (OverloadedError, UnavailableError) as error:
        # A probe needs to know that it is no time for requests, not why.
        refusal = as_api_error(error)
        return error_response(ApiError(503, str(error), headers=refusal.headers))
    return json_response({"status": "ready"})


@router.get("/version", response_model=None, summary="The server's version")
async def show_version(request: Request) -> Response:
    """The installed package's."""
    return json_response({"version": package_version()})


@router.get("/metrics", response_model=None, summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    """Text format 0.0.4."""
    return Response(context(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def package_version() -> str:
    """Return the installed version, or 'unknown' when run from a bare source tree."""
    try:
        return version("headway")
    except PackageNotFoundError:
        return "unknown"
