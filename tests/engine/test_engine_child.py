"""The end of an engine's process, as the server's event loop sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.runtime.engine import process as module
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.process import EngineProcess, start_engine
from headway.runtime.launcher.processes import SpawnedProcess


class Corpse(subprocess.Popen[bytes]):
    """A process that the system does not let go of before `released`, however it was killed."""

    def __init__(self) -> None:
        self.released = threading.Event()
        super().__init__([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)

    def poll(self) -> int | None:
        return super().poll() if self.released.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        bounded = timeout is not None or threading.current_thread() is not threading.main_thread()
        assert bounded, "the event loop waits for it"
        if not self.released.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return super().wait(timeout)


@contextmanager
def held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EngineProcess, Corpse]]:
    corpse = Corpse()
    monkeypatch.setattr(module, "spawn", lambda endpoint, config, module: SpawnedProcess(corpse))
    monkeypatch.setattr(module, "_END_S", 0.05)
    try:
        yield start_engine(EngineConfig(model="m"), "m", folder, 0), corpse
    finally:
        corpse.released.set()
        assert corpse.wait(20) == -signal.SIGKILL


def test_a_killed_process_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(tmp_path, monkeypatch) as (child, corpse):
        child.end(at_once=True)
        child.end(at_once=True)
        assert corpse.poll() is None
        corpse.released.set()
        reaper = child.process._reaper
        assert reaper is not None
        reaper.join(20)
        assert corpse.returncode == -signal.SIGKILL
        child.end(at_once=True)


def test_the_last_end_waits_for_a_moment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(tmp_path, monkeypatch) as (child, corpse):
        os.kill(corpse.pid, signal.SIGSTOP)  # SIGTERM does nothing to it
        os.waitid(os.P_PID, corpse.pid, os.WSTOPPED | os.WNOWAIT)
        child.end()
        child.end()
        assert corpse.poll() is None
        assert os.waitid(os.P_PID, corpse.pid, os.WEXITED | os.WNOWAIT) is not None, "it was killed all the same"
