"""Settings with which a rank's process is started. No torch."""

from __future__ import annotations

import msgspec

from headway.perf.latency.layout import ParallelLayout


class RankPeer(msgspec.Struct, frozen=True, kw_only=True):
    """Settings by which a rank connects to other instances of the cluster."""

    number: int
    """The instance's number."""
    incarnation: int
    """How many processes had the number before."""
    listen: str
    """Where ranks accept connections: a socket path, to which each rank appends its number (`unix:`), or a port."""
    secret: str
    connector: str
    """See `runtime.engine.config.InstanceConfig.kv_connector`."""

    def address(self, rank: int) -> str:
        """Return the address on which a rank listens."""
        return f"{self.listen}.{rank}" if self.listen.startswith("unix:") else self.listen


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that are the same for all ranks of a host."""

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
    """The CUDA device of the host's first rank; the others have those that follow. None: the CPU."""
    nodes: int = 1
    host: str = "127.0.0.1"
    """Address of node 0, which has the rendezvous store."""
    token: str | None = None
    """Authenticates to the engine's socket where that can be reached from other hosts."""
    patience_s: float = 300.0
    """How long ranks wait for each other in a collective. The engine notices a rank that is gone much sooner."""
    timeout_s: float = 10.0
    """A rank without heartbeats for so long is lost."""
    start_timeout_s: float = 120.0
    """Likewise while the rank loads the model."""
    log_level: str = "info"
    log_format: str = "text"
    instance: int | None = None
    """The instance's number in log lines, if any."""
    peer: RankPeer | None = None
    """None where KV does not move."""

    def device(self, rank: int) -> str:
        """Return a rank's device, as torch names it. Hosts have equally many ranks, in order."""
        each = self.layout.accelerators // self.nodes
        return "cpu" if self.cuda is None else f"cuda:{self.cuda + rank % each}"

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(tp=self.tp, stages=self.stages, kvp=self.kvp)
