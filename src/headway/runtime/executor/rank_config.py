"""What a rank's process is started with. No torch."""

from __future__ import annotations

import msgspec

from headway.perf.latency.layout import ParallelLayout


class RankPeer(msgspec.Struct, frozen=True, kw_only=True):
    """Of an instance of a cluster: its number, life and secret, where its ranks hear other instances (each under a name
    of its own, or a port), and how KV moves (`runtime.engine.config.InstanceConfig`)."""

    number: int
    incarnation: int
    listen: str
    secret: str
    connector: str

    def address(self, rank: int) -> str:
        """Where a rank listens."""
        return f"{self.listen}.{rank}" if self.listen.startswith("unix:") else self.listen


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The same for all ranks of a host. `cuda`: the CUDA device of a host's first worker, the others have those behind
    it; None: the CPU. `host` is the address of node 0, where the rendezvous store is; `token` is what
    the engine's socket asks for when it can be reached from other hosts. `patience_s` bounds how long ranks wait for
    each other in a collective (a rank that is gone is noticed much sooner by its process). `timeout_s`: a rank that was
    not heard of for so long is lost; `start_timeout_s` while it loads. `log_level`, `log_format`: the server's;
    `instance`: whose number log lines bear, if anybody's. `peer`: None where KV does not move."""

    model: str
    dtype: str
    max_model_len: int | None
    attention_backend: str
    threads: int
    kv_blocks: int
    block_tokens: int
    eos: tuple[int, ...]
    tp: int
    stages: int
    kvp: int
    cuda: int | None = None
    nodes: int = 1
    host: str = "127.0.0.1"
    token: str | None = None
    patience_s: float = 300.0
    timeout_s: float = 10.0
    start_timeout_s: float = 120.0
    log_level: str = "info"
    log_format: str = "text"
    instance: int | None = None
    peer: RankPeer | None = None

    def device(self, rank: int) -> str:
        """Where a rank computes, as torch spells it. Hosts have equally many ranks, in order."""
        each = self.layout.accelerators // self.nodes
        return "cpu" if self.cuda is None else f"cuda:{self.cuda + rank % each}"

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(tp=self.tp, stages=self.stages, kvp=self.kvp)
