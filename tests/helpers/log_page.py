"""The live page of a simulated log, served on loopback by a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from tests.helpers.live_feeds import logged_events
from tests.helpers.polling import until

from headway.serving.live.pages import LogPlayer, create_app
from headway.serving.live.recordings import EngineRecording
from headway.sim.replay import replay


@contextmanager
def log_page(events: Sequence[dict[str, Any]] | None = None) -> Iterator[str]:
    """Yield the page's address. events: of the log, by default of a convoy."""
    app = create_app(LogPlayer(EngineRecording(replay(events or logged_events(), detail=True)), "convoy.jsonl"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, 60.0)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
