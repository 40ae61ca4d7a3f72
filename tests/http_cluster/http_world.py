"""A cluster of token servers, as an engine: for tests of `headway.runtime.cluster`."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.http_cluster.token_server import TokenServer

from headway.core.request import SamplingParams
from headway.perf.latency.table import MachineRates
from headway.runtime.assembly.cluster import http_cluster
from headway.runtime.cluster.client import ClusterClient
from headway.runtime.cluster.cluster_file import ClusterFile
from headway.runtime.cluster.http_backend import HttpInstance
from headway.runtime.embedded import model_path
from headway.runtime.engine.protocol import SubmitRequest

RATES = MachineRates(linear_flops=1e10, attention_flops=1e10, bandwidth=1e10, name="a made-up machine")


def request(name: str, prompt: Sequence[int], output: int, **params: Any) -> SubmitRequest:
    fields: dict[str, Any] = {"max_tokens": output, "temperature": 0.0, **params}
    timeout_s = fields.pop("timeout_s", None)
    return SubmitRequest(
        id=name, prompt_tokens=len(prompt), params=SamplingParams(**fields), received_s=0.0, timeout_s=timeout_s
    )


def server_of(cluster: ClusterClient, number: int) -> HttpInstance:
    found = cluster.registry[number]
    assert isinstance(found, HttpInstance)
    return found


async def ask(cluster: ClusterClient, name: str, prompt: Sequence[int], output: int, **params: Any) -> list[int]:
    """The tokens of one answer."""
    tokens: list[int] = []
    async with aclosing(stream(cluster, name, prompt, output, **params)) as pieces:
        async for piece in pieces:
            tokens += piece
    return tokens


async def stream(
    cluster: ClusterClient, name: str, prompt: Sequence[int], output: int, **params: Any
) -> AsyncIterator[tuple[int, ...]]:
    """The tokens of each delta."""
    submit = request(name, prompt, output, **params)
    async with aclosing(cluster.generate(submit, array("i", prompt).tobytes())) as deltas:
        async for delta in deltas:
            yield delta.tokens


@asynccontextmanager
async def cluster_of(
    servers: Sequence[TokenServer],
    placement: str = "jsq",
    options: dict[str, Any] | None = None,
    prefill: Sequence[TokenServer] = (),
    kv_events: Sequence[str] = (),
) -> AsyncIterator[ClusterClient]:
    """A started cluster of these servers, which are started too and end with the block."""
    for server in (*servers, *prefill):
        await server.start()
    urls = [server.url for server in servers]
    pools: list[dict[str, Any]] = [{"backend": "vllm", "urls": urls, "kv_events": list(kv_events)}]
    if prefill:
        pools.append({"backend": "vllm", "role": "prefill", "urls": [server.url for server in prefill]})
    file = ClusterFile.model_validate({"pools": pools, "placement": placement, "options": options or {}})
    cluster = http_cluster(file, str(model_path()), Path(), RATES)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()
        for server in (*servers, *prefill):
            await server.stop()
