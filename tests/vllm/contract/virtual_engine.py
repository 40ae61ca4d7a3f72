"""vLLM's real scheduler, KV cache manager and block pool around a made-up model runner, in virtual time.

No weights, no server: `schedule()` is answered with a token for every request whose prompt is computed, after a time
that a cost formula gives. A queue of depth two plays vLLM's asynchronous loop.
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.config import (
    CacheConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

import headway.vllm
from headway.perf.latency.table import MachineRates
from headway.vllm import adapter, latency

BLOCK = 16
RATES = MachineRates(
    linear_flops=6e10, attention_flops=2.5e10, bandwidth=2e10, fixed_s=5e-3, per_decode_s=2e-5, name="a slow processor"
)
"""What latency models start from. Virtual steps take their own time, from which the models learn."""
_SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 65536, "torch_dtype": "float32", "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip


@functools.cache
def model_config() -> ModelConfig:
    """Of a model that has no weights. Takes seconds: one for all tests."""
    folder = Path(tempfile.mkdtemp(prefix="headway-model-"))
    (folder / "config.json").write_text(json.dumps(_SHAPE))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=32768)


def _speculation(model: ModelConfig, parallel: ParallelConfig, asynchronous: bool, drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram_gpu" if asynchronous else "ngram",
        num_speculative_tokens=drafts,
        target_model_config=model,
        target_parallel_config=parallel,
    )


def _groups(windows: tuple[int, ...]) -> list[KVCacheGroupSpec]:
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
    specs = [SlidingWindowSpec(**shape, sliding_window=w) if w else FullAttentionSpec(**shape) for w in windows]
    return [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]


class VirtualEngine:
    """One engine core: a scheduler, and a runner whose steps take `cost_s(output)` seconds of virtual time."""

    def __init__(
        self,
        *,
        stock: bool = False,
        settings: dict[str, Any] | None = None,
        asynchronous: bool = False,
        blocks: int = 8192,
        batched_tokens: int = 2048,
        max_num_seqs: int = 64,
        policy: str = "fcfs",
        threshold: int = 0,
        adaptive: bool = False,
        caching: bool = True,
        rates: MachineRates = RATES,
        windows: tuple[int, ...] = (0,),
        drafts: int = 0,
        max_loras: int = 0,
        graphs: Sequence[int] = (),
        prefill_interval: int = 1,
    ) -> None:
        """`windows`: of each group of layers, tokens; 0: full attention. `drafts`: speculative tokens a step. `graphs`:
        tokens of captured CUDA graphs, to which steps are padded."""
        model = model_config()
        self.now = 1000.0
        self.depth = 2 if asynchronous else 1
        scheduling = SchedulerConfig.default_factory(
            max_model_len=model.max_model_len,
            max_num_batched_tokens=batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_chunked_prefill=True,
            prefill_schedule_interval=prefill_interval,
            async_scheduling=asynchronous,
            policy=policy,
            long_prefill_token_threshold=threshold,
            # vLLM 0.31 and later have it.
            **({"long_prefill_token_threshold_adaptive": True} if adaptive else {}),
        )
        cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
        parallel = ParallelConfig()
        config = VllmConfig(
            model_config=model,
            scheduler_config=scheduling,
            cache_config=cache,
            parallel_config=parallel,
            additional_config={"headway": settings or {}},
            lora_config=LoRAConfig(max_loras=max_loras, max_cpu_loras=16) if max_loras else None,
            speculative_config=_speculation(model, parallel, asynchronous, drafts) if drafts else None,
        )
        config.scheduler_config.async_scheduling = asynchronous  # platforms have their own default
        cache.num_gpu_blocks = blocks
        kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=_groups(windows))
        grammars = mock.Mock()
        # Asked up to vLLM 0.29.
        grammars.should_advance.return_value = False
        grammars.validate_tokens.side_effect = lambda request, tokens: tokens
        chosen: Any = (AsyncScheduler if asynchronous else StockScheduler) if stock else headway.vllm.Scheduler
        self.graphs = list(graphs)
        # Not this machine's rates, which differ from one to the next.
        with (
            mock.patch.object(latency, "machine_rates", return_value=rates),
            mock.patch.object(adapter, "graph_sizes", return_value=self.graphs),
        ):
            self.scheduler: Any = chosen(
                vllm_config=config,
                kv_cache_config=kv,
                structured_output_manager=grammars,
                block_size=BLOCK,
                hash_block_size=BLOCK,
                log_stats=True,
            )
        if not stock:
            self.scheduler.headway_clock = self.scheduler.headway_wall_clock = lambda: self.now
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._in_flight: deque[tuple[Any, list[str]]] = deque()
        self.arrived: dict[str, float] = {}
        self.first_token: dict[str, float] = {}
        self.finished: dict[str, float] = {}
        self.tokens_computed = 0
        self.steps = 0
        self.preemptions = 0
        self.log: list[dict[str, int]] = []
        self._generated: dict[str, int] = {}
        self._drafts = 0 if asynchronous else drafts
        """Drafts that the runner hands back; an asynchronous scheduler schedules placeholders by itself."""

    # -- requests -----------------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: int | list[int],
        output: int = 1,
        *,
        priority: int = 0,
        extra: dict[str, Any] | None = None,
        choices: list[str] | None = None,
        seed: int | None = None,
        adapter: int = 0,
    ) -> Request:
        """A request of `prompt` tokens (ids of its own, unless given). With `choices` its output has a grammar."""
        lora = LoRARequest(f"adapter{adapter}", adapter, "nowhere") if adapter else None
        if isinstance(prompt, int):
            number = len(self.arrived) + 1
            prompt = [(number * 7919 + i * 31) % 500 for i in range(prompt)]
        structured = StructuredOutputsParams(choice=choices) if choices else None
        params = SamplingParams(
            max_tokens=output, ignore_eos=True, extra_args=extra, structured_outputs=structured, seed=seed
        )
        params.update_from_generation_config({}, eos_token_id=1)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=self.now,
            priority=priority,
            block_hasher=self._hasher,
            lora_request=lora,
        )
        self.arrived[name] = self.now
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn of the engine's loop. False: there was nothing to do."""
        scheduler = self.scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            sampled = [n for n in output.num_scheduled_tokens if not scheduler.requests[n].is_prefill_chunk]
            self._in_flight.append((output, sampled))
            self.log.append(dict(output.num_scheduled_tokens))
            self.preemptions += len(output.preempted_req_ids or ())
            if len(self._in_flight) < self.depth and output.total_num_scheduled_tokens:
                return True
        if not self._in_flight:
            return False
        self._return(*self._in_flight.popleft())
        return True

    def run(self, most_steps: int = 200_000, each: Callable[[], None] | None = None) -> None:
        """Until everything has ended."""
        for _ in range(most_steps):
            if each is not None:
                each()
            if not self.step():
                return
        raise AssertionError(f"unfinished after {most_steps} steps: {list(self.scheduler.requests)[:10]}")

    def until(self, when: float, most_steps: int = 100_000) -> None:
        """Until this time of the virtual clock."""
        for _ in range(most_steps):
            if self.now >= when:
                return
            if not self.step():
                self.now = when
                return
        raise AssertionError("time does not pass")

    @property
    def used_blocks(self) -> int:
        """Blocks that somebody holds, by vLLM's own count."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def ttft_s(self, name: str) -> float:
        return self.first_token[name] - self.arrived[name]

    def _return(self, output: Any, sampled: list[str]) -> None:
        names = list(output.num_scheduled_tokens)
        self.now += self._cost_s(output)
        self.steps += 1
        self.tokens_computed += output.total_num_scheduled_tokens
        with_token = set(sampled)
        drafted = output.scheduled_spec_decode_tokens
        # Of the drafts that are verified none, some or all are right.
        tokens = [
            [100] * (1 + (self.steps + i) % (1 + len(drafted.get(name, ())))) if name in with_token else []
            for i, name in enumerate(names)
        ]
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={n: i for i, n in enumerate(names)}, sampled_token_ids=tokens
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if one.new_token_ids:
                    self.first_token.setdefault(one.request_id, self.now)
                    self._generated[one.request_id] = self._generated.get(one.request_id, 0) + len(one.new_token_ids)
                    self.on_token(one.request_id, len(one.new_token_ids))
                if one.finish_reason is not None:
                    self.finished[one.request_id] = self.now
        if self._drafts:
            ahead = [[7] * (self.steps % (1 + self._drafts)) for _ in sampled]
            self.scheduler.update_draft_token_ids(DraftTokenIds(sampled, ahead))

    def on_token(self, name: str, count: int) -> None:
        """Called for each output; for tests that record more."""

    def generated(self, name: str) -> int:
        return self._generated.get(name, 0)

    def _cost_s(self, output: Any) -> float:
        """2 ms, 0.1 ms a row (padding too), and attention by history."""
        if not output.total_num_scheduled_tokens:
            return 1e-3
        tokens = output.total_num_scheduled_tokens
        seconds = 2e-3 + 1e-4 * next((size for size in self.graphs if size >= tokens), tokens)
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests.get(name)
            past = 0 if request is None else request.num_computed_tokens
            seconds += 5e-9 * count * past
        return seconds


def storm(
    engine: VirtualEngine,
    seed: int,
    requests: int = 120,
    *,
    adapters: int = 0,
    most_output: int = 60,
    extra: dict[str, Any] | None = None,
    errors: int = 0,
) -> None:
    """Random additions and aborts, until all has ended: then nothing is held, by vLLM's count and by the policy's.
    Every tenth request or so has the arguments `extra`. `errors`: so many of the policy are expected."""
    chance = random.Random(seed)
    alive: list[str] = []
    for i in range(requests):
        if alive and chance.random() < 0.3:
            engine.abort(alive.pop(chance.randrange(len(alive))))
        name, prompt = f"r{i}", chance.choice([1, 40, 200, 3_000, 8_000])
        of_this = extra if chance.random() < 0.1 else None
        engine.add(
            name, prompt, chance.randrange(1, most_output), adapter=chance.randrange(adapters + 1), extra=of_this
        )
        alive.append(name)
        for _ in range(chance.randrange(4)):
            engine.step()
    engine.run()
    assert not engine.scheduler.requests
    assert engine.used_blocks == 0
    assert engine.scheduler.headway_errors == errors
    assert engine.scheduler._headway.pool.pledged_blocks == 0
