"""Load of a server from its Prometheus page, by the names that vLLM gives and `headway serve` has too."""

from __future__ import annotations

import re

import msgspec

_SAMPLE = re.compile(r"^vllm:(\w+)(\{[^}]*\})? (\S+)", re.MULTILINE)
_PREFILL = re.compile(r'^headway_prefill_seconds\{[^}]*tokens="(\d+)"[^}]*\} ([\d.e+-]+)$', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class ServerLoad(msgspec.Struct, frozen=True):
    """One scrape. Sums over the server's engines, where it has several."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the KV pool in use, the largest of all engines."""
    kv_tokens: int = 0
    """Tokens that the KV pool holds; 0: not stated."""
    block_tokens: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefill_s: tuple[tuple[int, float], ...] = ()
    """Tokens of prompts and their seconds alone, as Headway's scheduler in the server has learned; mean of its engines.
    """


def parse_load(page: str) -> ServerLoad:
    """Read a metrics page; what is not there is 0."""
    sums: dict[str, float] = {}
    usage, kv_tokens, block = 0.0, 0, 0
    for name, labels, text in _SAMPLE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if name == "kv_cache_usage_perc":
            usage = max(usage, value)
        elif name == "cache_config_info":
            config = dict(_LABEL.findall(labels))
            blocks, size = config.get("num_gpu_blocks", ""), config.get("block_size", "")
            if blocks.isdecimal() and size.isdecimal():
                kv_tokens, block = kv_tokens + int(blocks) * int(size), int(size)
        else:
            sums[name] = sums.get(name, 0.0) + value
    prefills: dict[int, list[float]] = {}
    for tokens, seconds in _PREFILL.findall(page):
        prefills.setdefault(int(tokens), []).append(float(seconds))
    return ServerLoad(
        running=int(sums.get("num_requests_running", 0)),
        waiting=int(sums.get("num_requests_waiting", 0)),
        kv_usage=usage,
        kv_tokens=kv_tokens,
        block_tokens=block,
        prompt_tokens_total=int(sums.get("prompt_tokens_total", 0)),
        generation_tokens_total=int(sums.get("generation_tokens_total", 0)),
        prefill_s=tuple((tokens, sum(each) / len(each)) for tokens, each in sorted(prefills.items())),
    )
