"""What an engine is, in lines: for `--dry-run`, and for the banner of a server that starts."""

from __future__ import annotations

from headway.perf.hardware.memory import available_bytes, gib
from headway.perf.hardware.utilisation import UtilisationBase
from headway.runtime.engine.protocol import EngineInfo


def summary(info: EngineInfo, groups: str | None = None) -> list[str]:
    """Return one line for each fact: model, layout, memory, policy. groups: what KV groups hold, if there are any."""
    per_token = info.kv_bytes // info.kv_tokens_total
    size = f"{info.parameters / 1e6:.1f} M parameters"
    cache = f"{gib(info.kv_bytes)} for {info.kv_tokens_total:,} tokens ({per_token:,} bytes a token)"
    aim = f", iterations of {info.t_target_s * 1e3:.0f} ms beside decodes" if info.t_target_s else ""
    processor = ", ".join(part for part in (info.processor or "not known", info.kernels, info.threads) if part)
    lines = [
        ("model", info.model),
        ("architecture", f"{info.architecture}, {size}, {info.dtype} on {info.device}"),
        ("processor", processor),
        ("layout", info.layout),
        ("weights", gib(info.weights_bytes) if info.weights_bytes else None),
        ("KV cache", f"{cache}, in blocks of {info.kv_block_tokens}"),
        ("KV groups", groups),
        ("memory available", gib(available_bytes())),
        ("longest context", f"{info.max_model_len:,} tokens, output included"),
        ("policy", f"{info.policy}, {info.chunking} chunks, {info.mode} mode{aim}"),
        ("latency from", info.profile),
        ("peak", None if info.utilisation is None else peaks(info.utilisation)),
    ]
    return [line(name, value) for name, value in lines if value]


def line(name: str, value: str) -> str:
    """Return a name and its value in the columns of `summary`."""
    return f"{name:<20} {value}"


def peaks(base: UtilisationBase) -> str:
    """Return what MFU and MBU are shares of."""
    return f"{base.peak_flops / 1e9:,.0f} GFLOP/s, {base.peak_bandwidth / 1e9:,.0f} GB/s ({base.origin})"
