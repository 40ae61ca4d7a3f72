"""One rank's process on this host: a fork of a server that has torch imported already. No torch here."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

import msgspec

from headway.perf.latency.layout import ParallelLayout
from headway.runtime.executor.rank_config import RankConfig
from headway.runtime.launcher.host_messages import HostHello, LaunchProcess

_PROCESS = "headway.runtime.executor.rank_process"


def warm() -> None:
    """Let the fork server import torch, and return at once. Called as soon as ranks are known to follow."""
    forkserver.set_forkserver_preload([_PROCESS])
    forkserver.ensure_running()


def launch(rank: int, endpoint: str, settings: bytes) -> ForkServerProcess:
    """Start rank `rank`, which will speak to the engine at `endpoint`. `settings`: a RankConfig as JSON."""
    warm()
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(rank, endpoint, settings), name=f"headway-rank-{rank}")
    process.start()
    return process


class RankLauncher:
    """`ProcessLauncher` of ranks.

    model, threads: what those of this host load and compute with, whatever node 0's folder is called.
    """

    noun = "worker"

    def __init__(self, model: str, threads: int | None, mine: HostHello, layout: ParallelLayout) -> None:
        self._model = model
        self._threads = threads or max(1, mine.cores * mine.nodes // layout.accelerators)

    def warm(self) -> None:
        """See `host_agent.ProcessLauncher`."""
        warm()

    def start(self, one: LaunchProcess) -> ForkServerProcess:
        """See `host_agent.ProcessLauncher`."""
        config = msgspec.json.decode(one.settings, type=RankConfig)
        settings = msgspec.structs.replace(config, model=self._model, threads=self._threads)
        return launch(one.rank, one.endpoint, msgspec.json.encode(settings))


def end_words(code: int) -> str:
    """How a process ended, from its exit code as multiprocessing has it."""
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


def _run(rank: int, endpoint: str, settings: bytes) -> None:
    """In the rank's process."""
    main: Callable[[int, str, bytes], None] = import_module(_PROCESS).main
    main(rank, endpoint, settings)
