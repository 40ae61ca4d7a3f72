"""Running the application with uvicorn: one process, one event loop, and an orderly end.

First SIGTERM or SIGINT: nothing new is taken, what was accepted is finished (for at most `drain_timeout_s`), then the
server ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from types import FrameType

import uvicorn
from fastapi import FastAPI

from headway.server.binding import check_binding
from headway.server.context import Context
from headway.server.logging import setup
from headway.server.settings import ServerSettings

log = logging.getLogger("headway.server")


class Server(uvicorn.Server):
    """uvicorn's server with draining. Use `serve`; tests start this one in a thread and set `should_exit`."""

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            h11_max_incomplete_event_size=64 << 10,
        )
        super().__init__(config)
        self._settings = settings
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        context = app.state.headway
        assert isinstance(context, Context)
        self._context = context
        logging.getLogger("uvicorn.error").addFilter(self._worth_logging)

    async def serve(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Until a signal, or until the engine cannot start."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)  # type: ignore[arg-type]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by uvicorn inside a signal handler; the work is done on the loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig).name)

    def _on_signal(self, name: str) -> None:
        if self._draining is None and self.started:
            log.info("draining", extra={"fields": {"signal": name, "in_flight": self._context.in_flight}})
            self._draining = asyncio.create_task(self._drain())
        elif not self.started:
            log.info("ending", extra={"fields": {"signal": name}})
            self.should_exit = True
            self._context.give_up()
        else:
            log.warning("ending at once", extra={"fields": {"signal": name}})
            self._context.keep_the_rest()
            self.should_exit = self.force_exit = True

    def _worth_logging(self, record: logging.LogRecord) -> bool:
        """False for the stack traces that uvicorn makes of an engine that did not start: `failure` says it in words."""
        return self._context.failure is None or record.levelno < logging.ERROR

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._context.engine.drain()
                while self._context.in_flight:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("draining took too long", extra={"fields": {"in_flight": self._context.in_flight}})
        except Exception:
            log.exception("draining failed")
        self._context.keep_the_rest()
        self.should_exit = True


def serve(app: FastAPI, settings: ServerSettings, *, force_binding: bool = False) -> bool:
    """Serve until a signal ends it. True when the server had started; False when its lifespan (the engine) failed.

    Raises ConfigError when the address is reachable from outside and there is no API key (see `check_binding`).
    """
    check_binding(settings.host, settings.api_key, force_binding)
    setup(settings.log_level, settings.log_format)
    server = Server(app, settings)
    try:
        server.run()
    except SystemExit:  # uvicorn's way to say that it could not start: address in use, or a failed lifespan
        log.info("not started")
    failure = app.state.headway.failure
    if failure is not None:
        log.error("the engine did not start", extra={"fields": {"reason": str(failure)}})
    return server.started
