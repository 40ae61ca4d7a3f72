"""Entry point of group `vllm.endpoint_plugins`: `GET /v1/headway/why/REQUEST_ID` on vLLM's own server.

Off unless `VLLM_PLUGINS` names it (`VLLM_PLUGINS=headway`), as vLLM demands of plug-ins with routes. The path begins
with `/v1`, which `--api-key` guards. Headway's own server explains by `LogExplainer` too.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATH = "/v1/headway/why/{request_id}"
_NO_LOG = (
    'there is no decision log: set {"headway": {"log": FILE}} in --additional-config; with data parallelism run '
    "`headway why` on the log of each rank"
)
_PATIENCE_S = 60.0


class LogExplainer:
    """Explains requests of a log by `headway why` in a process of its own, one at a time: a replay reads the whole log,
    and takes the interpreter for seconds, which a server's other requests must not feel."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def explain(self, log: Path, request_id: str, under: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
        """Return (HTTP status, body): the JSON of `headway why`, or an error in OpenAI's form."""
        settings = [f"--under={each}" for each in under]
        words = ["why", f"--log={log}", *settings, "--json=-", "--", request_id]
        async with self._turn:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "headway.cli.main", *words, stdout=pipe, stderr=pipe
            )
            try:
                out, err = await asyncio.wait_for(process.communicate(), _PATIENCE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
                return error(
                    503, f"the log takes longer than {_PATIENCE_S:.0f} s to replay: run `headway why` beside it"
                )
            except asyncio.CancelledError:
                process.kill()
                raise
        if process.returncode:
            return error(404, err.decode(errors="replace").strip().removeprefix("headway: error: "))
        return 200, json.loads(out)


def error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    """Return (HTTP status, body) of an error in OpenAI's form."""
    kind = "NotFoundError" if status == 404 else "ServiceUnavailableError"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


class WhyEndpoint:
    """vLLM's `EndpointPlugin`: explains a request from the decision log."""

    name = "headway"
    required_tasks = None

    def __init__(self) -> None:
        # The decision log; None: the plug-in's settings name none.
        self.log: Path | None = None
        self._explainer = LogExplainer()

    def attach_router(self, app: Any) -> None:
        """Add the route to vLLM's FastAPI app."""
        from fastapi.responses import JSONResponse

        async def why(request_id: str) -> JSONResponse:
            status, body = await self.explain(request_id)
            return JSONResponse(body, status)

        app.add_api_route(PATH, why, methods=["GET"], response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Find the log in the engine's settings. Raises ConfigError for impossible ones."""
        from headway.policy.hosted.settings import read_settings  # heavy: Headway's own server needs none

        if engine_client is not None:
            config = engine_client.vllm_config
            ranks = config.parallel_config.data_parallel_size
            self.log = read_settings(config.additional_config).log if ranks == 1 else None

    async def explain(self, request_id: str) -> tuple[int, dict[str, Any]]:
        """Return (HTTP status, body): the JSON of `headway why`, or an error in OpenAI's form."""
        if self.log is None:
            return error(404, _NO_LOG)
        return await self._explainer.explain(self.log, request_id)
