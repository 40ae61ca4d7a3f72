"""Makes this process look like Python on an ARM Mac with a base install: import it before anything of Headway.

What Linux alone has is taken away (`os.eventfd`, `select.epoll`, `memfd_create`, affinity masks, /proc, /sys,
/dev/shm), the system calls itself Darwin on arm64, and no package of the extra `serve` can be imported.
"""

from __future__ import annotations

import builtins
import io
import os
import platform
import select
import shutil
import signal
import sys
import sysconfig
import urllib.request  # noqa: F401 - with sys.platform changed it would look for macOS's own proxy settings
from typing import Any

from headway.core.errors import SERVE_ONLY

LINUX_ONLY: dict[Any, tuple[str, ...]] = {
    os: (
        *("eventfd", "eventfd_read", "eventfd_write", "EFD_CLOEXEC", "EFD_NONBLOCK", "EFD_SEMAPHORE"),
        *("memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING", "pidfd_open", "sched_getaffinity", "sched_setaffinity"),
        *("posix_fadvise", "posix_fallocate", "splice", "getrandom"),
    ),
    select: ("epoll",),
    signal: ("pidfd_send_signal",),
}
LINUX_PATHS = ("/proc", "/sys", "/dev/shm")
ABSENT = SERVE_ONLY | {"huggingface_hub", "transformers", "vllm", "pyarrow"}


class BaseInstall:
    """Another finder, which does not find the packages that a base install lacks."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)


def _refuse(real: Any) -> Any:
    def opened(file: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(file, str | os.PathLike) and str(file).startswith(LINUX_PATHS):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return real(file, *arguments, **named)

    return opened


sysconfig.get_config_vars()  # read while the build's own file can still be found
for module, names in LINUX_ONLY.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
about = os.uname_result(("Darwin", "mac", "24.0.0", "Darwin Kernel", "arm64"))
os.uname = lambda: about
platform.system, platform.machine, platform.processor = lambda: "Darwin", lambda: "arm64", lambda: "arm"
builtins.open = io.open = _refuse(io.open)
shutil.disk_usage = _refuse(shutil.disk_usage)
sys.meta_path[:] = [BaseInstall(finder) for finder in sys.meta_path]
