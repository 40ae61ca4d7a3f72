"""The launcher of a cluster's hosts beside node 0: whole engines, each an instance
(`runtime.launcher.host_agent.ProcessLauncher`)."""

from __future__ import annotations

import os
import signal
import subprocess
import weakref
from contextlib import suppress

import msgspec

from headway.runtime.engine.config import EngineConfig
from headway.runtime.launcher.engine_spawn import ENGINE, spawn
from headway.runtime.launcher.host_messages import LaunchProcess
from headway.runtime.launcher.network import address_towards


class EngineProcess:
    """An engine as a `runtime.launcher.host_agent.HostedProcess`. sentinel: a pidfd.

    Raises OSError without one, and ends the process, which could not be watched.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process, self.name = process, name
        self.pid = process.pid
        try:
            self.sentinel = os.pidfd_open(process.pid)
        except OSError:
            self.kill()
            self.join()
            raise
        weakref.finalize(self, os.close, self.sentinel)

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        was = self._process.returncode
        code = self._process.poll()
        if was is None and code is not None:
            self._sweep()
        return code

    def kill(self) -> None:
        """It, and all that it has started."""
        if self._process.poll() is None:
            self._sweep()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def _sweep(self) -> None:
        """Its workers end with it; one that is stopped might not."""
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)


class EngineLauncher:
    """model: this host's copy. node0: an address of node 0, on the way to which other instances find this host's."""

    noun = "instance"

    def __init__(self, model: str, node0: str, module: str = ENGINE) -> None:
        self._model, self._node0, self._module = model, node0, module

    def warm(self) -> None:
        """See `runtime.launcher.host_agent.ProcessLauncher`: there is nothing that they could share."""

    def start(self, one: LaunchProcess) -> EngineProcess:
        """See `runtime.launcher.host_agent.ProcessLauncher`."""
        config = msgspec.json.decode(one.settings, type=EngineConfig)
        assert config.instance is not None
        own = msgspec.structs.replace(config.instance, listen=f"tcp:{address_towards(self._node0)}:0")
        config = msgspec.structs.replace(config, instance=own, model=self._model)
        return EngineProcess(spawn(one.endpoint, config, self._module), f"instance {one.rank}")
