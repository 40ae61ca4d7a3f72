"""What can be set about the HTTP server. One frozen record; the command line is derived from its field metadata.

Each field carries `help` (one sentence, with the unit), and where the flag is not simply the field's name with dashes,
`flag`. Nothing here is read from the environment: whoever builds the record decides where values come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headway.core.errors import ConfigError


def _help(text: str, **more: Any) -> dict[str, Any]:
    return {"help": text, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of one server process. Times in seconds, sizes in bytes. `__post_init__` refuses what cannot work."""

    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata=_help("Names that requests may give as 'model'; the first is shown. Default: the engine's."),
    )
    host: str = field(default="127.0.0.1", metadata=_help("Address to listen on."))
    port: int = field(default=8000, metadata=_help("Port to listen on; 0 picks a free one."))
    api_key: str | None = field(
        default=None, metadata=_help("Clients of /v1, /tokenize and /detokenize must send it as a Bearer token.")
    )
    start_engine: bool = field(default=True, metadata=_help("Start the engine with the server.", internal=True))
    max_body_bytes: int = field(default=64 << 20, metadata=_help("Largest request body, in bytes; above it: 413."))
    max_buffered_bytes: int = field(
        default=1 << 30, metadata=_help("Bodies being read or parsed at one time, in bytes in all; above it: 429.")
    )
    body_timeout_s: float = field(
        default=60.0, metadata=_help("Seconds within which a request body must have arrived.")
    )
    max_concurrent_requests: int = field(
        default=1024, metadata=_help("Generation requests in flight at one time; above it: 429.")
    )
    max_queued_requests: int = field(
        default=0,
        metadata=_help("Requests that may wait in the engine before new ones get 429; 0: the engine decides."),
    )
    max_prompts: int = field(default=64, metadata=_help("Prompts in one batched completions request."))
    max_n: int = field(default=1, metadata=_help("Largest 'n'. Only 1 is supported.", internal=True))
    request_timeout_s: float | None = field(
        default=None,
        metadata=_help("Seconds after which a request is ended; a request may ask for less, not for more."),
    )
    keep_alive_s: float = field(
        default=10.0, metadata=_help("Seconds of silence in a stream after which a ': keep-alive' comment is sent.")
    )
    slow_client_timeout_s: float = field(
        default=30.0, metadata=_help("Seconds that a client may leave its stream unread before the request is aborted.")
    )
    slow_client_buffer_bytes: int = field(
        default=256 << 10, metadata=_help("Unsent stream data kept for one client, in bytes, before its stream waits.")
    )
    slo_min_ttft_s: float = field(
        default=0.05, metadata=_help("Tightest time to first token that a client may ask for.")
    )
    slo_max_ttft_s: float = field(
        default=3600.0, metadata=_help("Loosest time to first token that a client may ask for.")
    )
    slo_min_tbt_s: float = field(
        default=0.005, metadata=_help("Tightest time between tokens that a client may ask for.")
    )
    slo_max_tbt_s: float = field(default=60.0, metadata=_help("Loosest time between tokens that a client may ask for."))
    drain_timeout_s: float = field(
        default=300.0, metadata=_help("Seconds that a SIGTERM waits for accepted requests to finish.")
    )
    worker_threads: int = field(
        default=2,
        metadata=_help("Threads that parse and tokenise bodies above 8 KiB, and as many for those above 256 KiB."),
    )
    journal: str | None = field(
        default=None,
        metadata=_help("Folder of a journal from which the next server takes up accepted requests; it holds prompts."),
    )
    journal_keep_s: float = field(
        default=3600.0, metadata=_help("Seconds that the answers of requests that were taken up again are kept.")
    )
    log_level: str = field(default="info", metadata=_help("debug, info, warning or error."))
    log_format: str = field(default="text", metadata=_help("text (key=value) or json (one object a line)."))

    def __post_init__(self) -> None:
        positive = (
            "max_body_bytes", "max_buffered_bytes", "body_timeout_s", "max_concurrent_requests", "max_prompts",
            "keep_alive_s", "slow_client_timeout_s", "slow_client_buffer_bytes", "slo_min_ttft_s", "slo_min_tbt_s",
            "worker_threads", "journal_keep_s",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 (got {getattr(self, name)})")
        for what in ("ttft", "tbt"):
            low, high = getattr(self, f"slo_min_{what}_s"), getattr(self, f"slo_max_{what}_s")
            if low > high:
                raise ConfigError(f"slo_min_{what}_s ({low}) must not be above slo_max_{what}_s ({high})")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must lie in 0..65535 (got {self.port})")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise ConfigError(f"request_timeout_s must be above 0 (got {self.request_timeout_s})")
        if self.max_n != 1:
            raise ConfigError(f"max_n must be 1: several choices for one prompt are not supported (got {self.max_n})")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level must be debug, info, warning or error (got {self.log_level!r})")
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format must be text or json (got {self.log_format!r})")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key must not be empty; leave it out to serve without one")
