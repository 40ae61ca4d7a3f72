"""Where measured profiles are kept: one JSON file per model × device × layout, in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from headway.core.errors import ConfigError
from headway.perf.latency.tables import SCHEMA, TableSource


def fingerprint(model: str, dtype: str, device: str, threads: int, layout: str = "tp1-pp1-kvp1") -> str:
    """What a profile holds for. `device` names the processor, not just its kind."""
    return f"{model}|{dtype}|{device}|{threads} threads|{layout}"


def default_path(mark: str) -> Path:
    """`$XDG_CACHE_HOME/headway/latency/<hash>.json` (default ~/.cache)."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "headway" / "latency" / f"{hashlib.sha256(mark.encode()).hexdigest()[:24]}.json"


def save(source: TableSource, path: Path) -> None:
    """Write atomically; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(source), indent=1))
    scratch.replace(path)


def load(path: Path, mark: str | None) -> TableSource:
    """Read a profile; raises ConfigError when the file is unreadable or holds for something else than `mark`."""
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
    if mark is not None and source.fingerprint != mark:
        raise ConfigError(
            f"the latency profile {path} was measured for\n  {source.fingerprint}\nand not for\n  {mark}\n"
            "make one with `headway profile`"
        )
    return source
