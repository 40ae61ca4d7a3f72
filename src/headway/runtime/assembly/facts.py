"""What a checkpoint's folder says without loading it, and what a started engine is, in lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.core.errors import CheckpointError
from headway.core.files import JsonFields, read_json
from headway.perf.device import available_bytes, gib
from headway.perf.utilisation import UtilisationBase
from headway.runtime import embedded
from headway.runtime.engine.protocol import EngineInfo


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Return the token ids that end an answer: all that any of the files names.

    generation_config.json and config.json give ids; tokenizer_config.json, or special_tokens_map.json where that has no
    `added_tokens_decoder`, give the text of `eos_token`. A fine-tuned model often has its own in one of them only.
    """
    config = _json(folder / "config.json")
    found: list[int] = []
    for data in (_json(folder / "generation_config.json"), config):
        value = data.get("eos_token_id")
        found += [item for item in (value if isinstance(value, list) else [value]) if type(item) is int]
    tokenizer = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in tokenizer:
        tokenizer |= _json(folder / "special_tokens_map.json")
    token = tokenizer.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        # A value of another type is an error of the reader of that file, which runs later.
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            found += [token for token in _ids_of(text, tokenizer, folder) if type(token) is int]
    vocabulary = config.get("vocab_size")
    most = vocabulary if isinstance(vocabulary, int) else max(found, default=0) + 1
    return tuple(dict.fromkeys(token for token in found if 0 <= token < most))


def _ids_of(text: str, config: Mapping[str, Any], folder: Path) -> list[int]:
    """Return the id of a token; empty where none of the tokenizer's files has it."""
    description = _json(folder / "tokenizer.json")
    for token in description.get("added_tokens") or ():
        if token.get("content") == text:
            return [token["id"]]
    vocabulary = (description.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    more = {token.get("content"): int(index) for index, token in (config.get("added_tokens_decoder") or {}).items()}
    known = {**_json(folder / "added_tokens.json"), **more, **vocabulary}
    return [known[text]] if text in known else []


def _json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty where there is no such file: its readers report that."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def model_name(folder: str) -> str:
    """Return a model's default name: its folder's last part."""
    path = Path(folder).resolve()
    return embedded.MODEL_NAME if path == embedded.model_path().resolve() else path.name


def longest_context(folder: Path) -> int:
    """Return the positions that config.json says the model has. Raises ConfigError where it says none."""
    path = folder / "config.json"
    return JsonFields(read_json(path), str(path)).whole("max_position_embeddings")


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
