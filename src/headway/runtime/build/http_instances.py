"""The instances of a cluster file of backend `vllm`, and what its policy decides by."""

from __future__ import annotations

from pathlib import Path

from headway.core.ports import free_port
from headway.perf.latency.ring import RingLatency
from headway.perf.latency.roofline import MachineRates, roofline
from headway.policy.placement.registry import PolicyContext
from headway.runtime.build.checkpoint_facts import eos_ids, longest_context, model_name
from headway.runtime.build.cluster_rules import links, policies_of, shape_of
from headway.runtime.cluster.cluster_file import ClusterFile
from headway.runtime.engine.protocol import EngineInfo
from headway.runtime.http_cluster.http_cluster import HttpClusterRules, HttpInstanceSettings
from headway.runtime.http_cluster.kv_events import events_config
from headway.runtime.http_cluster.prefill_queue import LearnedLatency
from headway.runtime.http_cluster.server_command import ServerCommand, server_words


def instance_settings(file: ClusterFile, model: str, folder: Path) -> list[HttpInstanceSettings]:
    """Return where each instance is, by number. folder: for the output of servers that the cluster starts."""
    found: list[HttpInstanceSettings] = []
    # Those that prefill come last: policies see the others, whose numbers have no gaps.
    for i, pool in sorted(enumerate(file.pools), key=lambda item: item[1].role == "prefill"):
        events = pool.kv_events or (None,) * len(pool.urls)
        found += [HttpInstanceSettings(i, url, None, pool.role, at) for url, at in zip(pool.urls, events, strict=True)]
        for _ in range(0 if pool.urls else pool.count):
            number, port = len(found), free_port()
            config, address = events_config(folder.resolve() / f"kv-{number}")
            words = server_words(pool.command, model, number, port, config)
            process = ServerCommand(words, port, folder / f"instance-{number}.log")
            at = address if any(config in word for word in words) else None
            found.append(HttpInstanceSettings(i, process.url, process, pool.role, at))
    return found


def rules_of(file: ClusterFile, model: str, rates: MachineRates) -> HttpClusterRules:
    """Return the policy, its predictions, and the checkpoint's facts. rates: where predictions start from."""
    shape, between = shape_of(model), links(file)
    source = f"roofline of {rates.name}"
    base = RingLatency(roofline(shape, rates), shape, between.inside, between.across, source=source)
    latency = LearnedLatency(base)
    context = PolicyContext(
        latency=latency,
        shape=shape,
        rows=file.span_rows,
        copies_prefixes=False,
        whole_prompts=True,
        relative_s=latency.relative,
    )
    facts = EngineInfo(
        model=model_name(model),
        architecture="decoder",
        dtype="their own precision",
        device="http",
        max_model_len=longest_context(Path(model)),
        vocab_size=shape.vocab,
        kv_tokens_total=0,
        kv_block_tokens=0,
        policy=file.placement,
        chunking="the servers' own",
        mode="placement",
        t_target_s=0.0,
        max_num_seqs=0,
        max_queued_requests=0,
        parameters=shape.parameters,
        weights_bytes=0,
        kv_bytes=0,
        eos_token_ids=eos_ids(Path(model)),
        layout=f"{sum(pool.size for pool in file.pools)} servers",
        profile=latency.source,
    )
    return HttpClusterRules(
        placement=file.placement,
        policy=policies_of(file, context),
        latency=latency,
        shape=shape,
        links=between,
        model=facts,
    )
