"""How a process notices that another one hangs or is gone: heartbeats, and the deadline of an iteration. No torch."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import zmq

if TYPE_CHECKING:
    from headway.runtime.engine.config import EngineConfig

_FRAME = struct.Struct("<dd")


@dataclass(frozen=True)
class IterationProgress:
    """How far the iteration is that an engine computes in its own process; without one, both are 0."""

    ran_s: float = 0.0
    """Seconds since it began."""
    predicted_s: float = 0.0

    def encode(self) -> bytes:
        """Return a heartbeat's frame."""
        return _FRAME.pack(self.ran_s, self.predicted_s)

    @classmethod
    def decode(cls, frame: bytes) -> Self:
        """Return the inverse of `encode`; a frame of another form says nothing."""
        return cls(*_FRAME.unpack(frame)) if len(frame) == _FRAME.size else cls()


@dataclass(frozen=True)
class IterationDeadline:
    """An iteration may take `factor` times its predicted time, and `floor_s` in any case.

    The floor covers what predictions do not know: first touches of memory, and other work on the cores.
    """

    floor_s: float
    factor: float

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Return an engine's deadline."""
        return cls(config.worker_timeout_s, config.hang_factor)

    def allowed_s(self, progress: IterationProgress) -> float:
        """Return the seconds that the iteration may take."""
        return max(self.floor_s, self.factor * progress.predicted_s)

    def missed(self, progress: IterationProgress) -> bool:
        """Whether the iteration hangs."""
        return progress.ran_s > self.allowed_s(progress)


_STARVED = 10.0
"""How many times its limit a process may take that waits for a core."""
_ASKED_S = 2.0
"""After how long without a question a process is not suspected any more."""


class StarvationCheck:
    """Tells a process of this host that waits for a core from one that hangs or is stopped, by Linux's /proc.

    Beside a hundred busy processes, one of lower priority may not run for seconds, and hang as little as any other.
    """

    def __init__(self) -> None:
        # By process: since when it is suspected, the CPU seconds that it had used by then, and the last question.
        self._suspected: dict[int, tuple[float, float, float]] = {}

    def excuses(self, pid: int | None, limit_s: float, now: float) -> bool:
        """Whether a process that has missed a limit has more time: it could run, and has not computed for `limit_s`
        since. Asked at least once a second while it misses the limit. pid: None, the process is on another host.
        """
        used_s = None if pid is None else runnable_cpu_s(pid)
        if pid is None or used_s is None:
            return False
        since_s, before_s, asked_s = self._suspected.get(pid, (now, used_s, now))
        if now - asked_s > _ASKED_S:
            since_s, before_s = now, used_s
        self._suspected[pid] = (since_s, before_s, now)
        return used_s - before_s < limit_s and now - since_s < _STARVED * limit_s


def runnable_cpu_s(pid: int) -> float | None:
    """Return the CPU seconds that a process has used, if one of its threads runs, waits for a core or for a disk.

    None where all of them sleep or are stopped, and where that is not known.
    """
    ticks, runnable = 0, False
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            # proc(5): the state, and eleven fields behind it the times in user and in kernel mode.
            state, *fields = (task / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[10]) + int(fields[11])
            runnable |= state in "RD"
    except (OSError, ValueError):  # another system, or it ends
        return None
    return ticks / os.sysconf("SC_CLK_TCK") if runnable else None


# Heartbeats: a process sends them while it runs, and a monitor notices when they stop.
#
# A beat tells that the process is scheduled and can be reached, not that it gets on: a long computation is no silence.

PER_TIMEOUT = 5
"""Beats within the time after which a silent process counts as lost."""
_AWAY_S = 1.0


class HeartbeatSender:
    """A thread that sends `frame()` every `every_s` seconds for as long as the process lives, whatever else it does.

    `connect` makes the thread's own socket; both are called in the thread.
    """

    def __init__(self, connect: Callable[[], zmq.Socket[Any]], frame: Callable[[], bytes], every_s: float) -> None:
        self._connect, self._frame, self._every_s = connect, frame, every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No beat follows; the socket is closed."""
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        socket = self._connect()
        while True:
            # The receiver has read nothing for a thousand beats (ZeroMQ's high-water mark).
            with suppress(zmq.Again):
                socket.send(self._frame(), zmq.NOBLOCK)
            if self._stopped.wait(self._every_s):
                break
        socket.close(linger=0)


class HeartbeatMonitor:
    """When each of some processes was last heard of. Times in seconds, of the listener's clock.

    Time in which the listener itself did not look does not count: what was said meanwhile waits in its socket. pid_of:
    the process id of a member of this host, so that one which waits for a core is not taken for silent.
    """

    def __init__(
        self,
        members: Iterable[int],
        timeout_s: float,
        now: float,
        pid_of: Callable[[int], int | None] = lambda member: None,
    ) -> None:
        self.timeout_s = timeout_s
        self._pid_of, self._starved = pid_of, StarvationCheck()
        self._last_beat_s = dict.fromkeys(members, now)
        self._looked_s = now

    def record_beat(self, member: int, now: float) -> None:
        """Note a message of one process."""
        self._last_beat_s[member] = now

    def silent(self, now: float) -> int | None:
        """Return a process that was silent for longer than `timeout_s`; None: there is none.

        Called at least once a second, after all messages that had come were noted.
        """
        # The monitor itself was away: beats of that time may still wait in its socket.
        away_s = now - self._looked_s
        if away_s > max(_AWAY_S, self.timeout_s / PER_TIMEOUT):
            for member, beat_s in self._last_beat_s.items():
                self._last_beat_s[member] = min(now, beat_s + away_s)
        self._looked_s = now
        for member, beat_s in self._last_beat_s.items():
            if now - beat_s > self.timeout_s and not self._starved.excuses(self._pid_of(member), self.timeout_s, now):
                return member
        return None
