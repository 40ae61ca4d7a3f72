"""Reader of CSV (also .gz) and Parquet files as columns, with errors that name the file and the columns."""

from __future__ import annotations

import csv
import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.errors import ConfigError
from headway.perf.latency.operators.profiles import Column


class ColumnTable:
    """Columns of text or numbers. `numbers` and `words` raise ConfigError on what is missing or malformed."""

    def __init__(self, path: Path, columns: dict[str, list[Any]]) -> None:
        self.path = path
        self.columns = columns

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def _column(self, name: str) -> list[Any]:
        if name not in self.columns:
            raise ConfigError(f"{self.path}: no column {name!r}; it has {', '.join(self.columns)}")
        return self.columns[name]

    def numbers(self, name: str, default: float | None = None) -> Column:
        """Return a column as floats (empty cells: NaN). default: value of every row when the file lacks the column."""
        if default is not None and name not in self.columns:
            return np.full(len(self), default)
        values = self._column(name)
        try:
            return np.array([np.nan if v is None or v == "" else float(v) for v in values], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.path}: column {name!r} is not a number everywhere ({error})") from error

    def words(self, name: str) -> npt.NDArray[np.str_]:
        """Return a column as strings."""
        return np.array([str(v) for v in self._column(name)])


def read_table(path: Path) -> ColumnTable:
    """Read a .csv, .csv.gz or .parquet file (the last needs `pip install headway[fit]`), told apart by the name's end.

    Raises ConfigError when it cannot be read."""
    try:
        if path.name.endswith(".parquet"):
            return _parquet(path)
        if path.name.endswith((".csv", ".csv.gz")):
            return _csv(path)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from error
    raise ConfigError(f"{path}: profiles are .csv, .csv.gz or .parquet files")


def _csv(path: Path) -> ColumnTable:
    data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    rows = csv.reader(data.decode("utf-8-sig").splitlines())
    header = next(rows, None)
    if not header:
        raise ConfigError(f"{path} is empty")
    body = [row for row in rows if row]
    short = next((i for i, row in enumerate(body) if len(row) != len(header)), None)
    # Reported line: the header is line 1, and `short` counts rows from 0.
    if short is not None:
        raise ConfigError(f"{path}: line {short + 2} has {len(body[short])} fields, the header {len(header)}")
    if not body:
        raise ConfigError(f"{path} has a header but no rows")
    return ColumnTable(path, dict(zip(header, map(list, zip(*body, strict=True)), strict=True)))


def _parquet(path: Path) -> ColumnTable:
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(f"{path}: reading Parquet needs pyarrow: pip install 'headway[fit]'") from error
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is not a Parquet file: {error}") from error
    if not table.num_rows:
        raise ConfigError(f"{path} has no rows")
    return ColumnTable(path, {name: table[name].to_pylist() for name in table.column_names})
