"""What differs between versions of vLLM, or is read from its configuration: one function each.

`version_check.KNOWN` says which versions these functions hold for.
"""

from __future__ import annotations

from typing import Any

from headway.vllm.latency import EngineFacts


def version() -> str:
    """Return `vllm.__version__`."""
    import vllm

    return str(vllm.__version__)


def decidable(request: Any) -> bool:
    """Whether the policy may make a request wait; others start as soon as vLLM lets them.

    Not remote prefills (another instance holds KV for them), pooling, input that still streams in, nor encoder inputs,
    which vLLM has cut at their own borders before it asks for a quota."""
    remote = (request.kv_transfer_params or {}).get("do_remote_prefill")
    return not (
        request.pooling_params is not None
        or request.resumable
        or remote
        or request.has_encoder_inputs
        or request.abort_immediately
    )


def most_active(scheduler: Any) -> int:
    """Return how many requests may run at once; vLLM 0.31 and later know a limit beside the workers' rows."""
    return int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs))


def engine_index(vllm_config: Any) -> int:
    """Return the number of this engine among those of a data-parallel server."""
    parallel = vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))


def engine_facts(vllm_config: Any) -> EngineFacts:
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return EngineFacts(
        hf_config=model.hf_text_config.to_dict(),
        dtype_bytes=model.dtype.itemsize,
        device_name="cpu" if current_platform.is_cpu() else current_platform.get_device_name(),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
    )
