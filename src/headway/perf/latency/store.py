"""Storage of measured profiles: one JSON file per model × device × layout, in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from headway.core.errors import ConfigError
from headway.perf.latency.table_latency import SCHEMA, TableSource


def fingerprint(model: str, dtype: str, device: str, threads: int, layout: str = "tp1-pp1-kvp1") -> str:
    """Return the key of a profile. device: the processor's name, not just its kind."""
    return f"{model}|{dtype}|{device}|{threads} threads|{layout}"


def threads_of(path: Path) -> int | None:
    """Return the number of threads that a profile was measured with. None: the file is not one that says so."""
    try:
        words = load(path, None).fingerprint.split("|")
        return int(words[3].removesuffix(" threads"))
    except (ConfigError, IndexError, ValueError):
        return None


def default_path(mark: str) -> Path:
    """Return the path of the profile with fingerprint `mark`: `$XDG_CACHE_HOME/headway/latency/<hash>.json`.

    The default of `$XDG_CACHE_HOME` is ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "headway" / "latency" / f"{hashlib.sha256(mark.encode()).hexdigest()[:24]}.json"


def save(source: TableSource, path: Path) -> None:
    """Write a profile atomically, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Per process: two processes that profile at once do not write into one scratch file.
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(source), indent=1))
    scratch.replace(path)


def load(path: Path, mark: str | None) -> TableSource:
    """Read a profile. Raises ConfigError when the file is unreadable or its fingerprint is not `mark` (None: any)."""
    try:
        source = msgspec.json.decode(path.read_bytes(), type=TableSource)
    except OSError as error:
        raise ConfigError(f"cannot read the latency profile {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a latency profile ({error}): make one with `headway profile`") from error
    if source.schema != SCHEMA:
        raise ConfigError(
            f"{path} has schema {source.schema!r}, which this version cannot read: make one with `headway profile`"
        )
    # A profile of another model, device, layout or number of threads would mispredict silently.
    if mark is not None and source.fingerprint != mark:
        raise ConfigError(
            f"the latency profile {path} was measured for\n  {source.fingerprint}\nand not for\n  {mark}\n"
            "make one with `headway profile`"
        )
    return source
