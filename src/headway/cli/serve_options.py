"""All settings of `headway serve`, in vLLM's spelling where vLLM has them."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from headway.cli.options import SettingOption, boolean
from headway.core.errors import ConfigError
from headway.core.units import size, tokens
from headway.perf.hardware.device import check
from headway.policy.iteration.config import SchedulerConfig
from headway.runtime.engine.config import EngineConfig
from headway.runtime.model.config import check_dtype
from headway.serving.settings import ServerSettings


def _text(value: Any) -> str:
    return str(value)


def _dtype(value: Any) -> str:
    return check_dtype(str(value))


def _device(value: Any) -> str:
    return check(str(value))


def _names(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list) else tuple(str(value).split(","))


def _schedule(value: Any) -> str:
    if value not in ("stream", "microbatch"):
        raise ConfigError(f"{value!r} is neither stream nor microbatch")
    return str(value)


ENGINE_OPTIONS = (
    SettingOption("dtype", _dtype, "auto", "type of weights and KV: auto (the checkpoint's), float32 or bfloat16"),
    SettingOption(
        "device",
        _device,
        "auto",
        "where to compute: auto (a CUDA device for each worker if there are so many, else cpu), cpu, cuda, or cuda:N "
        "for the first worker's; CUDA is experimental: this version has not been run on a GPU",
    ),
    SettingOption(
        "max_model_len",
        tokens,
        None,
        "longest prompt plus output, in tokens; 128k and 1M are understood",
        metavar="LEN",
    ),
    SettingOption(
        "kv_cache_memory",
        size,
        None,
        "memory for keys and values, e.g. 4G; default: half of what is free",
        metavar="SIZE",
    ),
    SettingOption("block_size", int, 64, "tokens in a KV block", metavar="TOKENS"),
    SettingOption(
        "threads",
        int,
        None,
        "threads that compute, in each worker; default: torch's choice, or the cores divided by the workers",
        metavar="N",
    ),
    SettingOption(
        "tensor_parallel_size", int, 1, "workers that share every layer, by heads and MLP width", metavar="T"
    ),
    SettingOption(
        "pipeline_parallel_size", int, 1, "stages that the layers are cut into, one after another", metavar="S"
    ),
    SettingOption(
        "pipeline_schedule",
        _schedule,
        "stream",
        "stream: a prompt's next chunk enters when the first stage frees; microbatch: when its last has left all",
    ),
    SettingOption(
        "kv_parallel_size",
        int,
        1,
        "KV groups: copies of the model that each serve requests of their own and share the cache of long ones",
        metavar="K",
    ),
    SettingOption(
        "kv_shard_tokens",
        tokens,
        None,
        "tokens of one request that a KV group holds before another joins; default: what t-target-ms allows a decode",
        metavar="TOKENS",
    ),
    SettingOption(
        "nnodes", int, 1, "hosts that the workers are spread over; the same flags are given on each", metavar="N"
    ),
    SettingOption("node_rank", int, 0, "which of them this is; 0 is where clients connect", metavar="R"),
    SettingOption(
        "rdzv_endpoint",
        _text,
        None,
        "HOST[:PORT] of node 0, reachable from all; port 29400 if none is given",
        metavar="HOST:PORT",
    ),
    SettingOption(
        "rdzv_token",
        _text,
        None,
        "secret that all hosts share, best given in the environment; node 0 makes and prints one if there is none",
    ),
    SettingOption(
        "rdzv_timeout", float, 600.0, "seconds to wait for hosts, at first and when one is lost", metavar="SECONDS"
    ),
    SettingOption("max_queued_requests", int, 1024, "requests that may wait before new ones get 429", metavar="N"),
    SettingOption(
        "latency_profile",
        _text,
        "auto",
        "auto (cached, else quick), quick, or a file of `headway profile`",
        metavar="FILE",
    ),
    SettingOption(
        "worker_timeout",
        float,
        10.0,
        "seconds without a sign of life after which a worker, or the engine, counts as lost and is started again",
        metavar="SECONDS",
    ),
    SettingOption(
        "max_restarts",
        int,
        3,
        "restarts in a row of lost workers, or of a lost engine, none up for a minute; one more loss ends the service",
        metavar="N",
    ),
    SettingOption(
        "event_log",
        _text,
        None,
        "write what the scheduler saw and decided to this JSON-lines file; what is there stays, as FILE.until-TIME",
        metavar="FILE",
    ),
)

_SCHEDULER_FLAGS = {
    "policy": "scheduling_policy",
    "t_target_s": "t_target_ms",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
}
_SCHEDULER_HIDDEN = {"stages", "pipeline_schedule", "kv_parallel", "kv_shard_tokens"}
_SERVER_HIDDEN = {"start_engine", "max_n", "max_queued_requests"}


def scheduler_options() -> tuple[SettingOption, ...]:
    """One option for each field of `SchedulerConfig`; its mode's value where none is given."""
    options = []
    for field in fields(SchedulerConfig):
        if field.name in _SCHEDULER_HIDDEN:
            continue
        name = _SCHEDULER_FLAGS.get(field.name, field.name)
        parse: Any = _kind(field.default)
        text = field.metadata["help"]
        if field.name == "t_target_s":
            parse, text = float, text.replace("seconds", "milliseconds")
        default = 55 if field.name == "t_target_s" else field.default
        options.append(SettingOption(name, parse, default, text))
    return tuple(options)


def server_options() -> tuple[SettingOption, ...]:
    """One option for each public field of `ServerSettings`."""
    options = []
    for field in fields(ServerSettings):
        if field.name in _SERVER_HIDDEN:
            continue
        default = None if field.default is MISSING else field.default
        parse: Any = size if field.name.endswith("_bytes") else _kind(default)
        if field.name == "request_timeout_s":
            parse = float
        if field.name == "served_model_name":
            parse = _names
        text = str(field.metadata["help"]).rstrip(".")
        options.append(SettingOption(field.name, parse, default, text[0].lower() + text[1:]))
    return tuple(options)


def _kind(default: Any) -> Any:
    if isinstance(default, bool) or default is None:
        return boolean if isinstance(default, bool) else _text
    return type(default) if isinstance(default, int | float) else _text


def scheduler_fields(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """The fields of `SchedulerConfig` that somebody gave; the rest is the mode's."""
    fields_given = {}
    for field in fields(SchedulerConfig):
        name = _SCHEDULER_FLAGS.get(field.name, field.name)
        if name in given and field.name != "mode":
            value = values[name] / 1000.0 if field.name == "t_target_s" else values[name]
            fields_given[field.name] = boolean(value) if field.name == "space_sharing" else value
    return fields_given


def effective(values: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """All values, with what the mode decides where nobody gave a scheduler setting."""
    scheduler = SchedulerConfig.named(values["mode"], **scheduler_fields(values, given))
    shown = dict(values)
    for field in fields(SchedulerConfig):
        name = _SCHEDULER_FLAGS.get(field.name, field.name)
        if name in shown:
            value = getattr(scheduler, field.name)
            shown[name] = round(value * 1000.0, 6) if field.name == "t_target_s" else value
    return shown


def engine_config(model: str, values: dict[str, Any], given: set[str]) -> EngineConfig:
    """From resolved options; `given` names those that did not come from a default."""
    scheduler = scheduler_fields(values, given)
    SchedulerConfig.named(values["mode"], **scheduler)
    return EngineConfig(
        model=model,
        dtype=values["dtype"],
        device=values["device"],
        max_model_len=values["max_model_len"],
        kv_cache_bytes=values["kv_cache_memory"],
        block_size=values["block_size"],
        threads=values["threads"],
        tensor_parallel_size=values["tensor_parallel_size"],
        pipeline_parallel_size=values["pipeline_parallel_size"],
        kv_parallel_size=values["kv_parallel_size"],
        pipeline_schedule=values["pipeline_schedule"],
        nnodes=values["nnodes"],
        rdzv_endpoint=values["rdzv_endpoint"],
        rdzv_token=values["rdzv_token"],
        rdzv_timeout_s=values["rdzv_timeout"],
        max_queued_requests=values["max_queued_requests"],
        mode=values["mode"],
        scheduler=scheduler,
        latency_profile=values["latency_profile"],
        event_log=values["event_log"],
        worker_timeout_s=values["worker_timeout"],
        max_restarts=values["max_restarts"],
        log_level=values["log_level"],
        log_format=values["log_format"],
    )


def server_settings(values: dict[str, Any]) -> ServerSettings:
    """From resolved options."""
    names = {field.name for field in fields(ServerSettings)} - _SERVER_HIDDEN
    return ServerSettings(**{name: values[name] for name in names})


ALL = (*ENGINE_OPTIONS, *scheduler_options(), *server_options())
"""Every setting of `headway serve`."""
