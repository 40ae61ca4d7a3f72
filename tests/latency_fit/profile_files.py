"""Tiny profile files in each known format, made by a law that the tests know."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HEADS, KV_HEADS, HIDDEN, MLP = 32, 8, 4096, 14336
TOKENS = (1, 2, 4, 8, *range(16, 513, 16), 640, 768, 1024, 2048, 4096)

MLP_OPS = (
    "attn_pre_proj",
    "attn_post_proj",
    "mlp_up_proj",
    "mlp_down_proj",
    "attn_rope",
    "mlp_act",
    "input_layernorm",
    "post_attention_layernorm",
    "add",
    "emb",
)


def linear_ms(m: float, k: float, n: float) -> float:
    """Weights at 1.6 TB/s or arithmetic at 200 TFLOP/s by tiles of 128 rows, and 8 us."""
    tiles = -(-m // 128) * 128
    return 0.008 + 1e3 * max(2 * tiles * k * n / 200e12, 2 * k * n / 1.6e12)


def light_ms(tokens: float, width: float) -> float:
    return 0.004 + 1e3 * 6 * tokens * width / 1.2e12


def prefill_ms(chunk: float, past: float, q: float) -> float:
    return 0.012 + 1e3 * 4 * q * 128 * (chunk * chunk / 2 + chunk * past) / 150e12


def decode_ms(count: float, past: float, kv: float) -> float:
    return 0.011 + 1e3 * 4 * kv * 128 * count * past / 1.5e12


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opener: Callable[..., Any] = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "wt", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def mlp_csv(folder: Path, device: str = "a100", tokens: Sequence[int] = TOKENS) -> Path:
    header = ["num_tokens", "num_tensor_parallel_workers", "n_head", "n_kv_head", "n_embd", "n_expanded_embd"]
    header += ["vocab_size", "use_gated_mlp", *(f"time_stats.{op}.median" for op in MLP_OPS)]
    rows = []
    for tp in (1, 2):
        q, kv = HEADS // tp * 128, KV_HEADS // tp * 128
        for t in tokens:
            times = [
                linear_ms(t, HIDDEN, q + 2 * kv),
                linear_ms(t, q, HIDDEN),
                linear_ms(t, HIDDEN, 2 * MLP // tp),
                linear_ms(t, MLP // tp, HIDDEN),
                light_ms(t, q + kv),
                light_ms(t, MLP // tp),
                *(light_ms(t, HIDDEN) for _ in range(4)),
            ]
            rows.append([t, tp, HEADS, KV_HEADS, HIDDEN, MLP, 128256, True, *times])
    return write_csv(folder / "compute" / device / "owner" / "model" / "mlp.csv.gz", header, rows)


def network_csv(folder: Path, device: str = "a100") -> Path:
    header = ["time_stats.all_reduce.median", "rank", "num_workers", "size", "collective", "devices_per_node"]
    sizes = [2048 * 2**i for i in range(15)]
    rows = [[0.01 + 1e3 * s / 100e9, 0, w, s, "all_reduce", w] for w in (2, 4) for s in sizes]
    return write_csv(folder / "network" / f"{device}_dgx" / "all_reduce.csv", header, rows)


def attention_csv(folder: Path, device: str = "a100") -> Path:
    header = ["is_prefill", "batch_size", "prefill_chunk_size", "kv_cache_size", "n_q_head", "n_kv_head"]
    header += ["num_tensor_parallel_workers", "time_stats.attn_prefill.median", "time_stats.attn_decode.median"]
    rows: list[list[Any]] = []
    for chunk in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        histories = (0, 512, 1024, 2048, 4096)
        rows += [[True, 1, chunk, p, HEADS, KV_HEADS, 1, prefill_ms(chunk, p, HEADS), 0.0] for p in histories]
    for count in (1, 2, 4, 8, 16, 32, 64):
        histories = (32, 128, 512, 1024, 2048, 4096)  # type: ignore[assignment]
        rows += [[False, count, 0, p, HEADS, KV_HEADS, 1, 0.0, decode_ms(count, p, KV_HEADS)] for p in histories]
    return write_csv(folder / "compute" / device / "owner" / "model" / "attention.csv", header, rows)


def parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def gemm_parquet(folder: Path) -> Path:
    points = [(m, k, n) for m in (1, 16, 128, 1024, 8192) for k in (1024, 4096) for n in (1024, 8192)]
    return parquet(
        folder / "gemm.parquet",
        {
            "framework": ["VLLM"] * len(points),
            "version": ["0.1"] * len(points),
            "device": ["NVIDIA A100-SXM4-80GB"] * len(points),
            "gemm_dtype": ["bfloat16"] * len(points),
            **{name: [p[i] for p in points] for i, name in enumerate(("m", "k", "n"))},
            "latency": [linear_ms(*p) for p in points],
        },
    )


def generation_parquet(folder: Path) -> Path:
    points = [(b, s) for b in (1, 4, 16, 64) for s in (1, 63, 1023, 4095, 16383)]
    return parquet(
        folder / "generation_attention.parquet",
        {
            "framework": ["VLLM"] * len(points),
            "version": ["0.1"] * len(points),
            "device": ["NVIDIA A100-SXM4-80GB"] * len(points),
            "op_name": ["generation_attention"] * len(points),
            "batch_size": [p[0] for p in points],
            "isl": [1] * len(points),
            "step": [p[1] for p in points],
            "num_heads": [32] * len(points),
            "num_key_value_heads": [8] * len(points),
            "head_dim": [128] * len(points),
            "attn_dtype": ["bfloat16"] * len(points),
            "kv_cache_dtype": ["bfloat16"] * (len(points) - 1) + ["fp8"],
            "latency": [decode_ms(b, s, 8) for b, s in points],
        },
    )


def nccl_parquet(folder: Path) -> Path:
    sizes = [512 * 4**i for i in range(8)]
    return parquet(
        folder / "nccl.parquet",
        {
            "device": ["NVIDIA A100-SXM4-80GB"] * 8,
            "op_name": ["all_reduce"] * 8,
            "kernel_source": ["NCCL"] * 8,
            "nccl_dtype": ["half"] * 8,
            "num_gpus": [8] * 8,
            "message_size": sizes,
            "latency": [0.01 + 1e3 * 2 * s / 100e9 for s in sizes],
        },
    )
