"""Read public profiles of single operators (Vidur, Frontier, AIConfigurator) as `OperatorProfile`s.

The columns decide the format, not the name of the file. Vidur (microsoft/vidur): `mlp.csv` and `all_reduce.csv` or
`send_recv.csv`. Frontier (NetX-lab/Frontier): `attention.csv`. AIConfigurator (ai-dynamo/aiconfigurator):
`*_perf.parquet`. Conventions that the files do not state: a Vidur or Frontier file has the heads of the whole model and
the tensor-parallel degree; an AIConfigurator attention file has the heads of one rank; its message sizes are elements,
not bytes. Times are milliseconds, as in all these formats.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.errors import ConfigError
from headway.core.files import read_input
from headway.perf.latency.operators import Column

LINEAR = "linear"
"""Matrix products. Columns m (rows), k, n."""
ELEMENTWISE = "elementwise"
"""Norms, rotary embedding, activation, additions, embedding look-up. Columns tokens, width (elements a row)."""
PREFILL = "prefill"
"""Attention of prompts. Columns batch, chunk, past, q_heads, kv_heads, head_dim: of one rank, `past` cached."""
DECODE = "decode"
"""Attention of single tokens. Columns batch, past (of each request), q_heads, kv_heads, head_dim: of one rank."""
COLLECTIVE = "collective"
"""Columns workers, across (1 when nodes are crossed), bytes."""

FAMILIES = (LINEAR, ELEMENTWISE, PREFILL, DECODE, COLLECTIVE)


@dataclass(frozen=True)
class OperatorProfile:
    """Measurements of one operator. Points are unique: repeats are merged (median)."""

    family: str
    """One of `FAMILIES`."""
    op: str
    device: str
    """Accelerator name."""
    source: str
    """Kernel library and version, or the profiler: libraries differ more than shapes do."""
    group: str
    """Model and tensor-parallel degree, or another name of the file's subject."""
    x: Mapping[str, Column]
    """Columns of the family: point i is `x[column][i]`."""
    ms: Column
    """Milliseconds of each point."""

    def __len__(self) -> int:
        return int(self.ms.size)

    def where(self, keep: npt.NDArray[np.bool_]) -> OperatorProfile:
        """Return the points where `keep` is true."""
        x = {name: column[keep] for name, column in self.x.items()}
        return OperatorProfile(self.family, self.op, self.device, self.source, self.group, x, self.ms[keep])


def merged(
    family: str, op: str, device: str, source: str, group: str, x: Mapping[str, Column], ms: Column
) -> OperatorProfile:
    """Return a profile with repeated points merged (median); rows whose time is not positive and finite are dropped."""
    good = np.isfinite(ms) & (ms > 0)
    names = list(x)
    keys = np.stack([x[name][good] for name in names], axis=1)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    # Sorted by point, then time: each point's times are the slice bounds[i]:bounds[i + 1], its median their middle.
    order = np.lexsort((ms[good], inverse))
    bounds = np.searchsorted(inverse[order], np.arange(unique.shape[0] + 1))
    values = ms[good][order]
    low, high = bounds[:-1], bounds[1:]
    middle = (values[low + (high - low - 1) // 2] + values[low + (high - low) // 2]) / 2 if len(unique) else values
    columns = {name: unique[:, i] for i, name in enumerate(names)}
    return OperatorProfile(family, op, device, source, group, columns, np.asarray(middle, dtype=np.float64))


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
    data = read_input(path, 1 << 30)
    data = gzip.decompress(data) if path.name.endswith(".gz") else data
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
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ConfigError(f"{path}: reading Parquet needs pyarrow: pip install 'headway[fit]'") from error
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise ConfigError(f"{path} is not a Parquet file: {error}") from error
    if not table.num_rows:
        raise ConfigError(f"{path} has no rows")
    return ColumnTable(path, {name: table[name].to_pylist() for name in table.column_names})


DEVICES = {
    "a100": "a100-80gb",
    "a800": "a800-80gb",
    "h100": "h100-80gb",
    "h800": "h800-80gb",
    "h200": "h200-141gb",
    "b200": "b200-180gb",
    "l40s": "l40s-48gb",
}
_ELEMENT_BYTES = {"half": 2, "float16": 2, "bfloat16": 2, "float": 4, "float32": 4, "int8": 1, "fp8": 1}


def read(path: Path, device: str | None = None) -> list[OperatorProfile]:
    """Read all profiles of a file.

    device: overrides the one named by a column or the path. Raises ConfigError when there is none, or when the format
    is unknown."""
    table = read_table(path)
    for signature, reader in _FORMATS:
        if all(name in table for name in signature):
            return reader(table, device or _device(table))
    raise ConfigError(
        f"{path} is no profile that Headway knows; it has columns {', '.join(table.columns)}, and none of these sets: "
        + "; ".join("+".join(signature) for signature, _ in _FORMATS)
    )


def read_all(paths: Iterable[Path], device: str | None = None) -> list[OperatorProfile]:
    """Read several files in the order of their names, so that fits do not depend on the order of arguments."""
    return [profile for path in sorted(paths) for profile in read(path, device)]


def _device(table: ColumnTable) -> str:
    # A column first, then folders from the innermost outwards.
    words = [str(v).lower() for v in table.columns["device"][:1]] if "device" in table else []
    for word in (*words, *(part.lower() for part in reversed(table.path.parts[:-1]))):
        for key, name in DEVICES.items():
            if key in word:
                return name
    raise ConfigError(f"{table.path}: neither a column nor the path says which accelerator this is; give --device")


def _model(path: Path) -> str:
    parent = path.parent
    if (parent.parent.name and parent.parent.name[:1].isupper()) or parent.parent.name in ("meta-llama", "internlm"):
        return parent.name
    return parent.name or path.stem


def _mlp(table: ColumnTable, device: str) -> list[OperatorProfile]:
    """Read Vidur's `mlp.csv`: one layer's operators by tokens, cut by `num_tensor_parallel_workers`."""
    tokens, tp = table.numbers("num_tokens"), table.numbers("num_tensor_parallel_workers")
    heads, kv_heads = table.numbers("n_head"), table.numbers("n_kv_head")
    hidden, mlp = table.numbers("n_embd"), table.numbers("n_expanded_embd")
    head_dim = hidden / heads
    # 2 where gate and up are one product, else 1.
    gate = np.array([str(v).lower() in ("true", "1", "1.0") for v in table.words("use_gated_mlp")]) + 1.0
    q, kv = heads / tp * head_dim, np.maximum(kv_heads / tp, 1.0) * head_dim
    products = {
        "attn_pre_proj": (hidden, q + 2 * kv),
        "attn_post_proj": (q, hidden),
        "mlp_up_proj": (hidden, gate * mlp / tp),
        "mlp_down_proj": (mlp / tp, hidden),
    }
    widths = {
        "attn_rope": q + kv,
        "mlp_act": mlp / tp,
        "input_layernorm": hidden,
        "post_attention_layernorm": hidden,
        "add": hidden,
        "emb": hidden,
    }
    found: list[OperatorProfile] = []
    for degree in np.unique(tp):
        rows = tp == degree
        group = f"{_model(table.path)}/tp{int(degree)}"
        for op in (*products, *widths):
            name = f"time_stats.{op}.median"
            if name not in table:
                continue
            ms = table.numbers(name)[rows]
            if op in products:
                k, n = products[op]
                x = {"m": tokens[rows], "k": k[rows], "n": n[rows]}
                found.append(merged(LINEAR, op, device, "vidur", group, x, ms))
            else:
                x = {"tokens": tokens[rows], "width": widths[op][rows]}
                found.append(merged(ELEMENTWISE, op, device, "vidur", group, x, ms))
    return [p for p in found if len(p)]


def _network(table: ColumnTable, device: str) -> list[OperatorProfile]:
    """Read Vidur's collectives by bytes; with fewer devices per node than workers, messages cross nodes."""
    op = str(table.columns["collective"][0])
    ms = table.numbers(f"time_stats.{op}.median")
    workers, per_node = table.numbers("num_workers"), table.numbers("devices_per_node")
    x = {"workers": workers, "across": (per_node < workers).astype(np.float64), "bytes": table.numbers("size")}
    return [merged(COLLECTIVE, op, device, f"vidur-{table.path.parent.name}", op, x, ms)]


def _attention_csv(table: ColumnTable, device: str) -> list[OperatorProfile]:
    """Read Frontier's paged attention of one layer: prefill (chunk over a prefix) and decode rows in one file."""
    tp = table.numbers("num_tensor_parallel_workers")
    q, kv = table.numbers("n_q_head") / tp, np.maximum(table.numbers("n_kv_head") / tp, 1.0)
    batch, past = table.numbers("batch_size"), table.numbers("kv_cache_size")
    chunk = table.numbers("prefill_chunk_size")
    prefill = np.array([v.lower() in ("true", "1") for v in table.words("is_prefill")])
    # Rows of uneven batches have no single `past`.
    even = table.words("mode") == "even" if "mode" in table else np.ones(len(table), dtype=np.bool_)
    found = []
    for family, rows, op in ((PREFILL, prefill & even, "attn_prefill"), (DECODE, ~prefill & even, "attn_decode")):
        if not rows.any():
            continue
        x: dict[str, Column] = {"batch": batch[rows], "past": past[rows], "q_heads": q[rows], "kv_heads": kv[rows]}
        x["head_dim"] = np.full(int(rows.sum()), 128.0)
        if family == PREFILL:
            x["chunk"] = chunk[rows]
        ms = table.numbers(f"time_stats.{op}.median")[rows]
        found.append(merged(family, op, device, "frontier", _model(table.path), x, ms))
    return found


def _attention_parquet(table: ColumnTable, device: str) -> list[OperatorProfile]:
    """Read AIConfigurator's attention: context rows start from an empty cache, generation rows have `step` cached."""
    # Full attention in bfloat16 only: other rows measure FP8 or sliding windows.
    keep = np.ones(len(table), dtype=np.bool_)
    for name in ("attn_dtype", "kv_cache_dtype"):
        if name in table:
            keep &= table.words(name) == "bfloat16"
    if "window_size" in table:
        keep &= table.numbers("window_size") == 0
    decode = "generation" in str(table.columns["op_name"][0])
    x = {
        "batch": table.numbers("batch_size")[keep],
        "past": table.numbers("step", 0.0)[keep],
        "q_heads": table.numbers("num_heads")[keep],
        "kv_heads": table.numbers("num_key_value_heads")[keep],
        "head_dim": table.numbers("head_dim")[keep],
    }
    if not decode:
        x["chunk"] = table.numbers("isl")[keep]
    family = DECODE if decode else PREFILL
    return [merged(family, family, device, _library(table), "all heads", x, table.numbers("latency")[keep])]


def _gemm(table: ColumnTable, device: str) -> list[OperatorProfile]:
    keep = table.words("gemm_dtype") == "bfloat16"
    x = {name: table.numbers(name)[keep] for name in ("m", "k", "n")}
    return [merged(LINEAR, "gemm", device, _library(table), "all shapes", x, table.numbers("latency")[keep])]


def _collective_parquet(table: ColumnTable, device: str) -> list[OperatorProfile]:
    """Read AIConfigurator's NCCL and vLLM custom all-reduce files; `message_size` counts elements."""
    custom = "allreduce_dtype" in table
    kinds = table.words("allreduce_dtype" if custom else "nccl_dtype")
    size = np.array([_ELEMENT_BYTES.get(kind, 0) for kind in kinds], dtype=np.float64)
    ops, variants = table.words("op_name"), table.words("backend" if custom else "kernel_source")
    found = []
    for op in np.unique(ops):
        for variant in np.unique(variants):
            # 16-bit types only, hence 2 bytes an element below.
            rows = (ops == op) & (variants == variant) & (size == 2)
            if not rows.any():
                continue
            x = {
                "workers": table.numbers("num_gpus")[rows],
                "across": np.zeros(int(rows.sum())),
                "bytes": table.numbers("message_size")[rows] * 2,
            }
            ms = table.numbers("latency")[rows]
            found.append(merged(COLLECTIVE, str(op), device, str(variant).lower(), str(op), x, ms))
    return found


def _library(table: ColumnTable) -> str:
    if "framework" not in table:
        return "aiconfigurator"
    return f"{table.columns['framework'][0]}-{table.columns['version'][0]}".lower()


# (columns that identify a format, its reader); the first whose columns are all present is taken.
_FORMATS: tuple[tuple[tuple[str, ...], Callable[[ColumnTable, str], list[OperatorProfile]]], ...] = (
    (("num_tokens", "num_tensor_parallel_workers", "n_head", "n_expanded_embd"), _mlp),
    (("collective", "num_workers", "devices_per_node", "size"), _network),
    (("is_prefill", "prefill_chunk_size", "kv_cache_size", "n_q_head"), _attention_csv),
    (("gemm_dtype", "m", "n", "k", "latency"), _gemm),
    (("batch_size", "num_heads", "num_key_value_heads", "latency"), _attention_parquet),
    (("nccl_dtype", "message_size", "num_gpus", "latency"), _collective_parquet),
    (("allreduce_dtype", "message_size", "num_gpus", "latency"), _collective_parquet),
)
