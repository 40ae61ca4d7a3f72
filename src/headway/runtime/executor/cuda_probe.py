"""Probe of the CUDA devices that torch finds, in this process or, to keep torch out of it, in a separate one.

usage: python -m headway.runtime.executor.cuda_probe
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from headway.core.errors import ConfigError
from headway.perf.device import CudaReport


def look() -> CudaReport:
    """Return the CUDA devices, by importing torch and opening each device in this process."""
    import torch

    version = str(torch.__version__)
    if not torch.cuda.is_available():
        return CudaReport(version, torch.version.cuda is not None)
    devices = range(torch.cuda.device_count())
    names = tuple(torch.cuda.get_device_name(device) for device in devices)
    return CudaReport(version, True, names, tuple(torch.cuda.mem_get_info(device)[0] for device in devices))


def look_apart() -> CudaReport:
    """Return the CUDA devices as found by another process, which has ended when this returns. Raises ConfigError."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "headway.runtime.executor.cuda_probe"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        return msgspec.json.decode(done.stdout, type=CudaReport)
    except msgspec.MsgspecError as error:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(f"torch cannot be asked for CUDA devices: {lines[-1] if lines else error}") from error


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(look()))
