"""A live cluster of tiny engines for tests: its file, its processes, and what its operators' endpoints say."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
from tests.helpers.process_tree import child_pids

from headway.serving.load.convoy import ServerProcess

CLUSTER = (sys.executable, "-m", "headway.cli.main", "cluster")
MIXED = [{"count": 3}]
APART = [{"count": 2, "role": "prefill"}, {"count": 1, "role": "decode"}]


def write(
    folder: Path,
    model: Path,
    placement: str,
    options: object,
    pools: object,
    group_decode: str = "gather",
    **serve: object,
) -> str:
    """A cluster file; settings of all instances are for tiny models on few cores, spans of more than a few rows are
    computed in pieces."""
    settings = {"kv_cache_memory": "32M", "latency_profile": "quick", "threads": 1, **serve}
    content = {
        "model": os.path.relpath(model, folder), "placement": placement, "options": options, "pools": pools,
        "serve": settings, "group_decode": group_decode, "span_rows": 64,
    }  # fmt: skip
    path = folder / "cluster.yaml"
    path.write_text(json.dumps(content))
    return str(path)


def cluster(path: str, *arguments: str) -> ServerProcess:
    """`headway cluster` of a file, as a context manager."""
    return ServerProcess([path, *arguments], command=CLUSTER)


def instances(url: str) -> list[dict[str, Any]]:
    """What `GET /v1/cluster` says of each."""
    found: list[dict[str, Any]] = httpx.get(f"{url}/v1/cluster", timeout=10).json()["instances"]
    return found


def pid_of(url: str, number: int) -> int:
    """The process of an instance."""
    (pid,) = (each["pid"] for each in instances(url) if each["id"] == number)
    return int(pid)


def rank_pids(url: str, number: int) -> list[int]:
    return [rank for helper in child_pids(pid_of(url, number)) for rank in child_pids(helper)]
