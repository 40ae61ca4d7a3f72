"""Output files of `headway accel`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from headway.core.output_file import write_output


def write_json(path: Path | None, data: Any) -> bool:
    """Write JSON to a file, or to stdout for `-`; return True when it went to stdout. None: write nothing."""
    if path is None:
        return False
    import msgspec

    return write(path, msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


def write(path: Path, body: bytes) -> bool:
    """Write bytes to a file, or to stdout for `-`; return True when they went to stdout. Raises ConfigError."""
    # The caller prints no tables then, so that stdout is valid JSON or CSV.
    if str(path) == "-":
        sys.stdout.buffer.write(body)
        return True
    write_output(path, body)
    return False


def rows_csv(rows: list[dict[str, Any]]) -> bytes:
    """Return CSV with the columns of the first row; rows is not empty."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()
