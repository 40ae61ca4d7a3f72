"""`GET /v1/headway/why/ID` on vLLM's server: what `headway why` says, or one sentence."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from tests.helpers.unit_latency import small_machine

from headway.policy.iteration.config import SchedulerConfig
from headway.sim.loop import simulate
from headway.sim.spec import InstanceSpec
from headway.sim.workload import TraceRequest
from headway.vllm.endpoint import PATH, WhyEndpoint


def engine(log: Path | None, ranks: int = 1) -> Any:
    settings = {} if log is None else {"log": str(log)}
    config = SimpleNamespace(
        additional_config={"headway": settings}, parallel_config=SimpleNamespace(data_parallel_size=ranks)
    )
    return SimpleNamespace(vllm_config=config)


def write_log(path: Path) -> None:
    spec = InstanceSpec(config=SchedulerConfig(t_target_s=0.02), latency=small_machine(), kv_tokens=6_000)
    with path.open("w") as file:
        workload = [TraceRequest(0.0, 2_000, 4), TraceRequest(0.01, 100, 4)]
        simulate(spec, workload, log=lambda kind, fields: print(json.dumps({"event": kind, **fields}), file=file))


async def asked(plugin: WhyEndpoint, client: Any, *names: str) -> list[tuple[int, dict[str, Any]]]:
    await plugin.init_state(client, SimpleNamespace(), SimpleNamespace())
    return [await plugin.explain(name) for name in names]


def test_a_request_is_explained_from_the_log_and_an_unknown_one_is_not_found(tmp_path: Path) -> None:
    write_log(tmp_path / "log")
    # An id that looks like an option is an id.
    known, unknown = asyncio.run(asked(WhyEndpoint(), engine(tmp_path / "log"), "r1", "--help"))
    assert known[0] == 200
    assert known[1]["request"] == "r1"
    assert unknown[0] == 404
    assert "the log has no such request" in unknown[1]["error"]["message"]


def test_without_a_log_the_answer_says_how_to_get_one(tmp_path: Path) -> None:
    for client in (engine(None), engine(tmp_path / "log", ranks=2), None):
        ((status, body),) = asyncio.run(asked(WhyEndpoint(), client, "r1"))
        assert status == 404
        assert '{"headway": {"log": FILE}}' in body["error"]["message"]


def test_the_route_is_behind_the_api_key_of_vllm() -> None:
    app = FastAPI()
    WhyEndpoint().attach_router(app)
    assert PATH in {getattr(route, "path", "") for route in app.routes}
    assert PATH.startswith("/v1/")
