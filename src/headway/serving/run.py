"""Running the application with uvicorn: one process, one event loop, graceful shutdown, and the text printed at the
start.

First SIGTERM or SIGINT: new requests are refused, accepted ones are finished (for at most `drain_timeout_s`), then the
server shuts down. Second signal: it shuts down at once. In both cases clients without an answer get an error
(`ServerContext.interrupt_clients`) and a few seconds to read it. Third signal: connections are closed without waiting.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import logging
import math
import signal
import socket
import sys
from collections import Counter
from types import FrameType

import uvicorn
from fastapi import FastAPI

from headway.core.logs import setup
from headway.core.machine import give_back_memory
from headway.runtime.assembly.facts import line, summary
from headway.runtime.cluster.instances import InstanceAdmin
from headway.runtime.embedded import MODEL_NAME
from headway.runtime.embedded.passkey import QUESTION, needle
from headway.serving.context import ServerContext
from headway.serving.settings import ServerSettings, bind, cannot_listen, check_binding, release, url
from headway.serving.transport import ConnectionTable, HttpConnection, raise_file_limit


def banner(server: ServerContext, url: str) -> str:
    """Return the lines. url: where the server listens. Called when the engine is ready."""
    info, settings = server.engine.info, server.settings
    engine: object = server.engine
    kind = "vllm" if info.device == "http" else "native"
    lines = ["", f"Headway serves {', '.join(server.models())} at {url}", ""]
    if isinstance(engine, InstanceAdmin):
        report = engine.report()
        roles = Counter(one.role for one in report.instances)
        lines += [line("engine", f"{kind}, {len(report.instances)} instances")]
        lines += [line("placement", f"{report.placement} on {', '.join(f'{n} {role}' for role, n in roles.items())}")]
    else:
        lines += [line("engine", kind)]
    lines += summary(info)
    lines += [line("pages", f"{url}/ (links to /ui, /metrics, /health)"), "", example(server, url), ""]
    if settings.api_key is not None:
        lines.insert(-1, "(the key is the one that this server was given)")
    return "\n".join(lines)


def example(server: ServerContext, url: str) -> str:
    """Return a curl command that the server answers. An API key is named by its variable, never shown."""
    path, body = example_call(server)
    key = "" if server.settings.api_key is None else ' -H "Authorization: Bearer $HEADWAY_API_KEY"'
    return f"curl {url}/{path}{key} -H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'"


def example_call(server: ServerContext) -> tuple[str, dict[str, object]]:
    """Return path and body of a request that the model can answer: a chat if it has a template, else a completion.

    The embedded model is asked for a passkey, the one thing that it can do.
    """
    embedded = server.engine.info.model == MODEL_NAME
    text = f"{needle('84213')}{QUESTION}" if embedded else "Hello"
    body: dict[str, object] = {"model": server.models()[0], **({"temperature": 0} if embedded else {})}
    if server.tokenizer.has_template:
        return "v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    return "v1/completions", {**body, "prompt": text if server.tokenizer.has_text else [1, 2, 3]}


log = logging.getLogger("headway.server")

_LINGER_S, _SHORT_LINGER_S = 5, 1
"""Seconds for clients to read their last bytes: after a drain, and after a second signal."""
_CLIENTS_FAULTS = ("Invalid HTTP request", "Unsupported upgrade", "No supported WebSocket")
"""Beginnings of uvicorn's warnings about single requests."""


class DrainingServer(uvicorn.Server):
    """uvicorn's server with draining. Started by `serve`; tests start it in a thread and set `should_exit`."""

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        self._connections = ConnectionTable(settings)
        config = uvicorn.Config(
            app,
            http=functools.partial(HttpConnection, table=self._connections),  # type: ignore[arg-type]
            backlog=self._connections.backlog,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_keep_alive=math.ceil(settings.idle_timeout_s),
            timeout_graceful_shutdown=_LINGER_S,
            h11_max_incomplete_event_size=64 << 10,
        )
        super().__init__(config)
        self._settings = settings
        self._draining: asyncio.Task[None] | None = None
        self._second_signal = False
        self._loop: asyncio.AbstractEventLoop | None = None
        context = app.state.headway
        assert isinstance(context, ServerContext)
        self._context = context
        logging.getLogger("uvicorn.error").addFilter(self._worth_logging)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Run until a signal arrives or the engine fails to start. sockets: already bound, if any."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._connections.on_loop_error)
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening; called by uvicorn.

        Raises ConfigError when another process has begun to listen on the port since the sockets were bound.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            # uvicorn has run the lifespan's start by now: the engine must be closed before the error is raised.
            await self.lifespan.shutdown()
            raise cannot_listen(self._settings.host, self._settings.port, error) from error
        if sockets:
            where = url(self._settings.host, sockets[0])
            log.info("Uvicorn running on %s (Press CTRL+C to quit)", where)
            if log.isEnabledFor(logging.INFO) and self._settings.log_format == "text":
                # One text for people; as JSON the facts are those of /v1/models and /metrics.
                print(banner(self._context, where), file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Schedule `_on_signal` on the event loop; called by uvicorn inside a signal handler."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_signal, signal.Signals(sig).name)

    def _on_signal(self, name: str) -> None:
        if self._draining is None and self.started:
            fields = {"signal": name, "in_flight": self._context.in_flight, "second_signal": "ends at once"}
            log.info("draining", extra={"fields": fields})
            self._draining = asyncio.create_task(self._drain())
        elif not self.started:
            log.info("ending", extra={"fields": {"signal": name}})
            self.should_exit = True
            self._context.cancel_start()
        else:
            log.warning("ending at once", extra={"fields": {"signal": name, "in_flight": self._context.in_flight}})
            if self._draining is not None:
                self._draining.cancel()
            self._end(_SHORT_LINGER_S)
            # Set from the third signal on: uvicorn then drops connections that are still open.
            self.force_exit, self._second_signal = self._second_signal, True

    def _end(self, linger_s: int) -> None:
        """Interrupt all clients and shut down. linger_s: seconds for clients to read the error."""
        self._context.interrupt_clients()
        self.config.timeout_graceful_shutdown = linger_s
        self.should_exit = True

    def _worth_logging(self, record: logging.LogRecord) -> bool:
        """Filter uvicorn's log.

        Drops stack traces of an engine that did not start (`ServerContext.failure` has the message) and of requests
        that the shutdown cancelled, and what each malformed request of any client would write.
        """
        if record.getMessage().startswith(_CLIENTS_FAULTS):
            return False
        if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
            return False
        return self._context.failure is None or record.levelno < logging.ERROR

    async def _drain(self) -> None:
        """Finish accepted requests, for at most `drain_timeout_s` seconds, then shut down."""
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                # Nothing waits for them, and a drain waits for all that is to be computed.
                self._context.release_contexts()
                await self._context.engine.drain()
                # The engine is empty before the clients have read everything: wait for their last bytes.
                while self._context.in_flight:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("draining took too long", extra={"fields": {"in_flight": self._context.in_flight}})
        except Exception:
            log.exception("draining failed")
        self._end(_LINGER_S)


def serve(
    app: FastAPI, settings: ServerSettings, *, force_binding: bool = False, sockets: list[socket.socket] | None = None
) -> bool:
    """Serve until a signal; return whether the server had started (False: its lifespan, that is the engine, failed).

    sockets: from `bind`, where the caller bound the port earlier; closed at the end. Raises ConfigError when the
    address is reachable from outside and there is no API key (see `check_binding`), or cannot be listened on.
    """
    check_binding(settings.host, settings.api_key, force_binding)
    if sockets is None:
        sockets = bind(settings.host, settings.port)
    setup(settings.log_level, settings.log_format)
    raise_file_limit()
    give_back_memory()
    server = DrainingServer(app, settings)
    gc.freeze()  # what was imported stays: collections need not look at it
    gc.enable()
    try:
        server.run(sockets)
    except SystemExit:  # raised by uvicorn when the lifespan failed
        log.info("not started")
    finally:
        release(sockets)
    return server.started
