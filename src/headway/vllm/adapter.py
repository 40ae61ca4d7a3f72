"""What differs between versions of vLLM, or is read from its configuration: one function each.

`plugin.KNOWN` says which versions these functions hold for.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
from collections.abc import Container, Iterable
from itertools import chain
from typing import Any

from headway.core.errors import ConfigError
from headway.perf.device import processor_name
from headway.perf.latency import table
from headway.policy.hosted.settings import VllmSettings, read_settings
from headway.vllm.latency import EngineFacts


def version() -> str:
    """Return `vllm.__version__`."""
    import vllm

    return str(vllm.__version__)


def decidable(request: Any) -> bool:
    """Whether the policy may make a request wait; others start as soon as vLLM lets them.

    Not remote prefills (another instance holds KV for them), pooling, input that still streams in, nor encoder inputs,
    which vLLM has cut at their own borders before it asks for a quota, nor seeded requests on CPUs: one that is cut
    ends the engine; vLLM sets back a generator's offset (`GPUModelRunner._bookkeeping_sync`), a CPU's has none."""
    remote = (request.kv_transfer_params or {}).get("do_remote_prefill")
    return not (
        request.pooling_params is not None
        or (_on_cpu() and request.sampling_params.sampling_type.name == "RANDOM_SEED")
        or request.resumable
        or remote
        or request.has_encoder_inputs
        or request.abort_immediately
    )


@functools.cache
def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def settings_of(vllm_config: Any) -> VllmSettings:
    """Return the settings of the command line."""
    return read_settings(vllm_config.additional_config)


def refuse_held_prefills(vllm_config: Any) -> None:
    """Raise ConfigError where vLLM (0.33 and later) would hold back prefills in steps that quotas were made for."""
    interval = getattr(vllm_config.scheduler_config, "prefill_schedule_interval", None) or 1
    if interval > 1:
        raise ConfigError(
            f"--prefill-schedule-interval {interval} holds prefills back in steps that Headway has made chunks for: "
            "leave it out, Headway decides in every step which prefills get how many tokens"
        )


def most_active(scheduler: Any) -> int:
    """Return how many requests may run at once; vLLM 0.31 and later know a limit beside the workers' rows."""
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def holds_kv_blocks(scheduler: Any, request: Any) -> bool:
    """Return whether a waiting request has blocks. From vLLM 0.31 on such requests wait in a queue of their own."""
    return hasattr(scheduler, "kv_holding_waiting") and bool(scheduler._holds_kv_blocks(request))


def may_bar(scheduler: Any, waiting: Iterable[Any]) -> bool:
    """Return whether `barred` may hold some of `waiting`, in whatever order: there are slots for fewer LoRA adapters
    than are wanted, or the scheduler is paused. Running requests among `waiting` change nothing."""
    if scheduler.lora_config is None or paused(scheduler):
        return paused(scheduler)
    wanted = {*map(lora_of, chain(scheduler.running, past_gate(scheduler), waiting))} - {0}
    return len(wanted) > int(scheduler.lora_config.max_loras)


def barred(scheduler: Any, waiting: Iterable[Any]) -> set[str]:
    """Return the ids of those of `waiting`, most urgent first, that vLLM would not start in this step.

    It is paused, or their LoRA adapters have no slot. The adapter of a running request keeps its slot in a step without
    tokens for it: vLLM counts those of one step only, and ends with an assertion when the next one has too many."""
    if paused(scheduler):
        return {request.request_id for request in waiting}
    held = {adapter for adapter in map(lora_of, [*scheduler.running, *past_gate(scheduler)]) if adapter}
    left_out = set()
    for request in waiting:
        adapter = lora_of(request)
        if not adapter or adapter in held:
            continue
        if len(held) < scheduler.lora_config.max_loras:
            held.add(adapter)
        else:
            left_out.add(request.request_id)
    return left_out


def paused(scheduler: Any) -> bool:
    """Return whether waiting requests do not start (`/pause`, `/sleep`)."""
    return bool(scheduler.pause_state.name != "UNPAUSED")


def lora_of(request: Any) -> int:
    """Return the number of a request's LoRA adapter; 0: it has none."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0


def past_gate(scheduler: Any) -> list[Any]:
    """Return waiting requests that `schedule()` takes from other queues than the gated one."""
    return [*getattr(scheduler, "kv_holding_waiting", ()), *getattr(scheduler, "skipped_waiting", ())]


def put_back(scheduler: Any, decided: Container[str]) -> None:
    """Move the requests in `decided` that `schedule()` has put aside back to the waiting queue.

    Up to vLLM 0.30 they go to a second queue, whose requests `schedule()` takes first and past the gate."""
    aside = getattr(scheduler, "skipped_waiting", None)
    if not aside:
        return
    back = [request for request in aside if request.request_id in decided]
    if back:
        aside.remove_requests(back)
        for request in back:
            scheduler.waiting.add_request(request)


def needed_blocks(scheduler: Any, request: Any, tokens: int) -> int:
    """Return how many free blocks a request needs for so many tokens, as vLLM counts (windows, prefix hits)."""
    manager = scheduler.kv_cache_manager
    computed, blocks = request.num_computed_tokens, manager.empty_kv_cache_blocks
    if not computed:
        blocks, computed = manager.get_computed_blocks(request)[:2]
    slots = min(tokens, scheduler.max_model_len)
    count = manager.coordinator.get_num_blocks_to_allocate
    # vLLM 0.31 and later also count windows up to the prompt's end.
    ends = (
        {"prefill_end": max(request.num_prompt_tokens, request.num_tokens - 1)}
        if _names_prefill_end(count.__func__)
        else {}
    )
    needed = count(
        request_id=request.request_id,
        num_tokens=slots,
        new_computed_blocks=blocks.blocks,
        num_encoder_tokens=0,
        total_computed_tokens=computed,
        num_local_computed_tokens=computed,
        num_tokens_main_model=slots,
        apply_admission_cap=True,
        **ends,
    )
    return int(needed)


@functools.cache
def _names_prefill_end(function: Any) -> bool:
    return "prefill_end" in inspect.signature(function).parameters


def engine_index(vllm_config: Any) -> int:
    """Return the number of this engine among those of a data-parallel server."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))


def graph_sizes(vllm_config: Any) -> list[int]:
    """Return the numbers of tokens, ascending, that a step with prefills is padded to for a CUDA graph; []: to none.

    With speculative tokens the size of a step is not known before vLLM makes it."""
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    eager = vllm_config.model_config.enforce_eager or mode is None or mode.mixed_mode().name == "NONE"
    return [] if eager or vllm_config.num_speculative_tokens else sorted(compilation.cudagraph_capture_sizes or ())


def engine_facts(vllm_config: Any) -> EngineFacts:
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cpu = _on_cpu()
    return EngineFacts(
        hf_config=model.hf_text_config.to_dict(),
        dtype_bytes=model.dtype.itemsize,
        device_name="cpu" if cpu else current_platform.get_device_name(),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        fingerprint=_fingerprint(vllm_config, processor_name() if cpu else current_platform.get_device_name()),
    )


def _fingerprint(vllm_config: Any, device: str) -> str:
    """Return the key of a profile of this engine: its model, version, device and what changes a step's time.

    The limit on a step's tokens is not part of it: a table that ends earlier goes on as a line, which is still closer
    than the roofline that would take its place."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    # Where a checkpoint lies and what wrote it do not change its speed.
    shape = {
        k: v for k, v in model.hf_text_config.to_dict().items() if k not in ("_name_or_path", "transformers_version")
    }
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()[:12]
    name = f"{shape.get('model_type', 'model')}-{digest} in vLLM {version()}"
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") or "auto"
    compiled = "eager" if model.enforce_eager else "compiled"
    layout = f"tp{parallel.tensor_parallel_size}-pp{parallel.pipeline_parallel_size}-{compiled}-{bound}"
    return table.fingerprint(name, str(model.dtype), device, os.cpu_count() or 1, layout)
