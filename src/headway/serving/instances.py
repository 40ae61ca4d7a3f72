"""Endpoints for operators of a cluster: list its instances, add one, remove one, replace Tetris's improvement rates."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import OverloadedError
from headway.policy.placement.tetris_rates import RateTable
from headway.runtime.cluster.cluster_report import ImprovementRateAdmin, InstanceAdmin
from headway.serving.context import context
from headway.serving.errors import ApiError, json_response

router = APIRouter()

_LARGEST_BODY = 4096
_LARGEST_TABLE = 1 << 16


class _JoinBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pool: int = 0


@router.get("/v1/cluster", response_model=None, summary="The instances of the cluster, their state and load")
async def show(request: Request) -> Response:
    """404 where one engine serves alone."""
    return json_response(_cluster(request).report())


@router.get("/v1/cluster/instances/{number}", response_model=None, summary="One instance")
async def show_one(request: Request) -> Response:
    """Its state and load."""
    number = _number(request)
    # Few instances: a scan is cheaper than an index.
    for report in _cluster(request).report().instances:
        if report.id == number:
            return json_response(report)
    raise ApiError(404, f"there is no instance {number}")


@router.post("/v1/cluster/instances", response_model=None, summary="One more instance")
async def join(request: Request) -> Response:
    """`{"pool": 0}`: one like those of the cluster file's first pool. 202: it is starting, and gets work when ready."""
    cluster, server = _cluster(request), context(request)
    _check_json(request)
    pool = _pool(await server.active.begin(server.bodies.whole(request, _LARGEST_BODY)))
    present, most = len(cluster.report().instances), server.settings.max_instances
    if present >= most:
        raise OverloadedError(f"the cluster has {present} instances, and may have {most}", 30.0)
    return json_response(cluster.join(pool), 202)


def _pool(body: bytes) -> int:
    """Return the pool that a request to join names. Raises ApiError 400."""
    try:
        return msgspec.json.decode(body or b"{}", type=_JoinBody).pool
    except msgspec.DecodeError as error:
        raise ApiError(400, f'{error}: send {{"pool": 0}}', "pool") from None


@router.delete("/v1/cluster/instances/{number}", response_model=None, summary="Drain an instance, then end it")
async def leave(request: Request) -> Response:
    """202: it takes nothing new, and leaves the list when all that is there has ended."""
    cluster, number = _cluster(request), _number(request)
    if all(report.id != number for report in cluster.report().instances):
        raise ApiError(404, f"there is no instance {number}")
    return json_response(cluster.leave(number), 202)


@router.put("/v1/cluster/rates", response_model=None, summary="Tetris's improvement rates, from now on")
async def replace_rates(request: Request) -> Response:
    """The file that `headway profile rates` writes; used from the next decision on, under tetris."""
    server = context(request)
    engine: Any = server.engine
    if not isinstance(engine, ImprovementRateAdmin):
        raise ApiError(404, "this server places no requests by improvement rates: `headway cluster` does, under tetris")
    _check_json(request)
    table = _rates(await server.active.begin(server.bodies.whole(request, _LARGEST_TABLE)))
    engine.replace_rates(table)
    return json_response(table)


def _rates(body: bytes) -> RateTable:
    """Return the table in a body. Raises ApiError 400."""
    try:
        return msgspec.json.decode(body, type=RateTable)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f'{error}: send {{"points": [[requests a second, rate], ...]}}', "points") from None


def _check_json(request: Request) -> None:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    # What a form of a web page can send is not JSON.
    if kind != "application/json":
        raise ApiError(415, f"content-type {kind[:40]!r} is not supported: send application/json")


def _cluster(request: Request) -> InstanceAdmin:
    engine: Any = context(request).engine
    if not isinstance(engine, InstanceAdmin):
        raise ApiError(404, "this server has one engine and no cluster: `headway cluster` has")
    return engine


def _number(request: Request) -> int:
    text: str = request.path_params["number"]
    # One spelling per instance: no leading zeros, no other scripts' digits.
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or text != str(int(text)):
        raise ApiError(404, f"there is no instance {text[:40]!r}: instances have numbers")
    return int(text)
