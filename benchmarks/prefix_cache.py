"""Cost of the prefix cache: `python -m benchmarks.prefix_cache`. CPU time of one process where a loaded machine
would count otherwise.

Hit path: a prompt of 128K tokens is cached; the scheduler's decisions until its first token, and how many chunks that
takes. Unshared prompts: the embedded model serves random prompts and answers with and without the cache, in turns; the
pool is so small that each prompt evicts earlier ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

import numpy as np

from headway.core.batch import Batch, RequestProgress
from headway.core.clock import ManualClock
from headway.core.request import Request
from headway.core.sampling import SamplingParams
from headway.core.span import Span
from headway.kv.block_manager import BlockManager
from headway.kv.eviction import LeastRecentlyUsed
from headway.kv.prefix_cache import PrefixCache
from headway.kv.text_keys import block_keys
from headway.perf.latency.base import LatencyModel
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.scheduler import Scheduler
from headway.runtime.build.engine import assemble
from headway.runtime.embedded import model_path
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import SubmitRequest
from headway.serving.load.machine import machine

BLOCK = 64
TOKEN_BYTES = 1024
"""Of the embedded model's KV, in float32."""


def token_ids(count: int, seed: int) -> bytes:
    """Return random token ids, int32."""
    return np.random.default_rng(seed).integers(10, 2000, count).astype(np.int32).tobytes()


def engine(kv_tokens: int, cached: bool) -> EngineCore:
    """Return an engine of the embedded model."""
    config = EngineConfig(
        model=str(model_path()), kv_cache_bytes=kv_tokens * TOKEN_BYTES, block_size=BLOCK, prefix_cache=cached,
        threads=1,
    )  # fmt: skip
    return assemble(config, ManualClock())


class HitPath:
    """A scheduler without a model, in whose cache one long prompt lies."""

    def __init__(self, latency: LatencyModel, prompt_tokens: int) -> None:
        self.prompt = prompt_tokens
        self.keys = block_keys(token_ids(prompt_tokens, 0), BLOCK)
        self.cache = PrefixCache(LeastRecentlyUsed(), BLOCK)
        manager = BlockManager(4 * prompt_tokens, BLOCK, self.cache)
        self.scheduler = Scheduler(SchedulerConfig(), latency, manager)
        self.chunks = self.serve("first")[1]

    def serve(self, name: str) -> tuple[list[float], int]:
        """Serve the prompt with an answer of one token. Return the seconds of each decision, and the chunks."""
        cached = self.cache.register(name, self.keys, self.prompt)
        request = Request(id=name, arrival_s=0.0, prompt_tokens=self.prompt, max_output_tokens=1, cached_tokens=cached)
        self.scheduler.add(Span.whole(request), 0.0)
        decisions: list[float] = []
        while not self.scheduler.idle:
            # Not CPU time: reading that clock takes as long as a decision.
            began = time.perf_counter()
            batch = self.scheduler.schedule(0.0)
            decisions.append(time.perf_counter() - began)
            assert batch is not None
            self.scheduler.complete(batch.id, _tokens(batch), 0.0)
        return decisions, len(decisions)


def _tokens(batch: Batch) -> list[RequestProgress]:
    return [RequestProgress(chunk.request, 1, True) for chunk in batch.parts[0].prefills if chunk.last]


def hit_path(latency: LatencyModel, prompt_tokens: int, rounds: int) -> dict[str, float]:
    """Return decisions and chunks until the first token of a cached prompt."""
    path = HitPath(latency, prompt_tokens)
    path.serve("warm")
    # As the engine's process does before it serves.
    gc.collect()
    gc.freeze()
    served = [path.serve(f"again-{i}") for i in range(rounds)]
    first = [decisions[0] for decisions, _ in served]
    return {
        "prompt_tokens": prompt_tokens,
        "chunks_uncached": path.chunks,
        "chunks_cached": max(chunks for _, chunks in served),
        "decision_p50_us": 1e6 * statistics.median(first),
        "decision_p99_us": 1e6 * sorted(first)[int(0.99 * len(first))],
    }


def serve_all(core: EngineCore, prompts: list[bytes], output: int) -> float:
    """Serve prompts together and return the CPU seconds."""
    began = time.process_time()
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        message = SubmitRequest(id=f"p{i}", prompt_tokens=len(prompt) // 4, params=params, received_s=0.0)
        assert core.submit(message, memoryview(prompt)) is None
    while not core.idle:
        core.step()
    return time.process_time() - began


def unshared_loss(rounds: int, prompt_tokens: int, output: int) -> dict[str, float]:
    """Return the share of CPU time that the cache costs prompts that share nothing; median of rounds in turns."""
    kv_tokens = 3 * (prompt_tokens + output)
    plain, cached = engine(kv_tokens, False), engine(kv_tokens, True)
    ratios = []
    for turn in range(rounds + 1):
        prompts = [token_ids(prompt_tokens, 100 * turn + i) for i in range(2)]
        order = ((plain, cached), (cached, plain))[turn % 2]
        seconds = {core is cached: serve_all(core, prompts, output) for core in order}
        if turn:  # the first round warms caches and evicts nothing
            ratios.append(seconds[True] / seconds[False])
    manager = cached.scheduler.block_managers[0]
    assert manager.cache is not None
    assert manager.cache.hit_tokens == 0
    return {"prompt_tokens": prompt_tokens, "output_tokens": output, "loss": statistics.median(ratios) - 1.0}


def main() -> None:
    """Print the figures, as text or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    latency = engine(4096, False).scheduler.latency
    hit = hit_path(latency, 131_072, 20 * arguments.rounds)
    shapes = ((512, 64), (4096, 16))
    losses = [unshared_loss(arguments.rounds, prompt, output) for prompt, output in shapes]
    if arguments.json:
        print(json.dumps({"machine": machine(), "hit": hit, "unshared": losses}))
        return
    print(
        f"a cached prompt of {hit['prompt_tokens']:,} tokens: {hit['chunks_cached']} chunks to the first token "
        f"({hit['chunks_uncached']} without), decision {hit['decision_p50_us']:.0f} µs median, "
        f"{hit['decision_p99_us']:.0f} µs P99"
    )
    for one in losses:
        print(
            f"unshared prompts of {one['prompt_tokens']:,} and answers of {one['output_tokens']} tokens: "
            f"{one['loss']:+.1%} CPU time with the cache"
        )


if __name__ == "__main__":
    main()
