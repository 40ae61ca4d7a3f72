"""One rank's process on this host: a fork of a server that has torch imported already. No torch here."""

from __future__ import annotations

import atexit
import multiprocessing
import signal
from collections.abc import Callable
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

from headway.core.files import ScratchFolder

RANK = "headway.runtime.executor.rank_process"


def warm() -> None:
    """Let the fork server import torch, and return at once. Called as soon as ranks are known to follow."""
    # Its socket lies in multiprocessing's own folder, which stays on the disk after a kill.
    config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        folder = ScratchFolder("headway-ranks-")
        atexit.register(folder.close)
        config["tempdir"] = str(folder.path)
    forkserver.set_forkserver_preload([RANK])
    forkserver.ensure_running()


def launch(rank: int, endpoint: str, settings: bytes) -> ForkServerProcess:
    """Start rank `rank`, which will speak to the engine at `endpoint`. `settings`: a RankConfig as JSON."""
    warm()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(rank, endpoint, settings), name=f"headway-rank-{rank}")
    process.start()
    return process


def end_words(code: int) -> str:
    """How a process ended, from its exit code as multiprocessing has it."""
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


def _run(rank: int, endpoint: str, settings: bytes) -> None:
    """In the rank's process."""
    main: Callable[[int, str, bytes], None] = import_module(RANK).main
    main(rank, endpoint, settings)
