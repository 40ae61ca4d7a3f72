"""Writing what `headway accel` found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError


def write_json(path: Path | None, data: Any) -> bool:
    """To the file, or stdout for `-`; True when it went to stdout."""
    if path is None:
        return False
    import msgspec

    return write(path, msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


def write(path: Path, body: bytes) -> bool:
    """Bytes to a file, or stdout for `-`; True when they went to stdout. ConfigError when it cannot be written."""
    if str(path) == "-":
        sys.stdout.buffer.write(body)
        return True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return False


def rows_csv(rows: list[dict[str, Any]]) -> bytes:
    """One line a row, columns by the first."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()
