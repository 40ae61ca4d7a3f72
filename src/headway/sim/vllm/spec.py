"""Settings of a simulated vLLM engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.core.errors import ConfigError
from headway.policy.iteration.config import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class VllmSpec:
    """vLLM's own settings, by the names of its command line. Raises ConfigError on an impossible value."""

    num_blocks: int
    """KV blocks, the null block included (`num_gpu_blocks`)."""
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    max_model_len: int | None = None
    """Longest request, tokens; None: as many as the blocks hold."""
    by_priority: bool = False
    """`--scheduling-policy priority`."""
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    scheduler_reserve_full_isl: bool = True
    """A request begins only if the whole of its known tokens fits in the free blocks."""
    watermark: float = 0.0
    """Share of the blocks that a request which begins must leave free."""
    plugged: SchedulerConfig | None = None
    """Headway's policy inside (`VllmSettings.scheduler_config`); None: vLLM's stock scheduler."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Priority of the requests of a class; lower goes first, 0 without an entry."""

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ConfigError(
                f"the KV cache holds {self.num_blocks} blocks of {self.block_size} tokens, of which vLLM keeps one for "
                "itself: raise memory.kv_tokens or memory.utilisation"
            )

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can take: all but the null block."""
        return self.num_blocks - 1

    @property
    def longest_request(self) -> int:
        """Most tokens of one request, prompt and output."""
        held = self.usable_blocks * self.block_size
        return held if self.max_model_len is None else min(held, self.max_model_len)


def stock_flags(scheduler: str) -> tuple[bool, int]:
    """Return (by priority, threshold) of `default`, `priority`, `threshold:N` and `plugged`. Raises ConfigError."""
    name, colon, tokens = scheduler.partition(":")
    if name == "threshold" and colon and tokens.isdecimal() and int(tokens) > 0:
        return False, int(tokens)
    if scheduler in ("default", "plugged", "priority"):
        return scheduler == "priority", 0
    raise ConfigError(f"{scheduler!r} is none of default, priority, plugged and threshold:N, such as threshold:512")
