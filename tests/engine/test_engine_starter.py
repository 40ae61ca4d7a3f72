"""A host's engine processes: none runs unsupervised."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from headway.runtime.launcher.engine_starter import EngineProcess


def test_a_process_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors, or a kernel or a sandbox without pidfd_open."""

    def refused(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refused)
    words = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(words, start_new_session=True) as process:
        try:
            with pytest.raises(OSError, match="Too many open files"):
                EngineProcess(process, "instance 1")
            assert process.poll() == -9
        finally:
            process.kill()
