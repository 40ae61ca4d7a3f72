"""The settings of a cluster (`cluster.yaml`): the model, the instances with their roles and hosts, and the placement
policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import FileSection, validated
from headway.policy.placement.combinations import PlacementCombination, PoolShape
from headway.policy.placement.contract import Role
from headway.policy.placement.registry import DEFAULT, check_options
from headway.runtime.kv_transfer.connector import check_connector
from headway.sim.metrics import SloTargets
from headway.sim.scenario import WorkloadSection
from headway.sim.spec import RunSection

SPAN_ROWS = 512
LARGEST_POOL = 1024
_IN_PLACE = ("pecsched", "loongserve")
"""Policies whose papers let a long request decode where it was prefilled, over the KV of its whole group."""


Count = Annotated[int, Field(ge=1)]


class InstancePool(FileSection):
    """Equal instances of one role."""

    count: Annotated[int, Field(ge=1, le=LARGEST_POOL)] = Field(default=1, description="number of instances")
    role: Role = Field(
        default="mixed",
        description="`mixed`, `prefill` or `decode`; backend vllm: servers of role `prefill` compute all "
        "prompts and hand the KV to the mixed one that the policy chooses (all need vLLM's NixlConnector)",
    )
    backend: Literal["native", "vllm"] = Field(
        default="native",
        description="what computes: Headway's engine, or servers with vLLM's HTTP API, each of which serves whole "
        "requests; all pools have the same",
    )
    urls: tuple[str, ...] = Field(
        default=(), description="backend vllm: addresses of running servers, one an instance; none: they are started"
    )
    kv_events: tuple[str, ...] = Field(
        default=(),
        description="of `urls`, one each: where vLLM publishes its KV events (`tcp://10.0.0.1:5557`; replayed on the "
        "next port), so that hits are what is cached there, not what was sent",
    )
    command: str | None = Field(
        default=None,
        description="backend vllm: what starts one of `count` servers, with `{model}`, `{port}`, `{index}` and "
        "`{kv_events}` (for `--kv-events-config`) filled in; null: `vllm serve` with Headway's scheduler and no "
        "flags of your own",
    )
    host: Annotated[int, Field(ge=0)] = Field(
        default=0, description="the host that the instances run on: 0 is this one, the others are nodes of Ray"
    )
    serve: dict[str, Any] = Field(
        default_factory=dict, description="settings of `headway serve` for these instances alone, over the file's"
    )
    per_node: Count | None = Field(
        default=None,
        description="instances that policies take for one node, at most `count`; null: one node with all others of "
        "the host that do not say",
    )

    @model_validator(mode="after")
    def _servers_belong_to_vllm(self) -> InstancePool:
        given = [name for name in ("urls", "command") if getattr(self, name)]
        if self.backend == "native" and given:
            raise ValueError(f"{given[0]} is of servers behind HTTP: say `backend: vllm` too")
        if len(given) > 1:
            raise ValueError("the servers of urls are running: leave out command")
        if self.backend == "vllm" and self.serve:
            raise ValueError("`serve` is of Headway's engine: give the flags of vLLM servers in `command`")
        if self.urls and self.count not in (1, len(self.urls)):
            raise ValueError(f"count is {self.count}, and there are {len(self.urls)} urls: leave count out")
        if self.kv_events and len(self.kv_events) != len(self.urls):
            raise ValueError(f"there are {len(self.kv_events)} kv_events, and {len(self.urls)} urls: give one for each")
        for address in self.kv_events:
            at = re.fullmatch(r"tcp://.+:([0-9]{1,5})|ipc:///.+", address)
            if at is None or (at[1] and not 0 < int(at[1]) < 65535):
                raise ValueError(f"{address!r} is no address such as tcp://127.0.0.1:5557")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no address such as http://127.0.0.1:8000")
        if self.backend == "vllm" and (self.host or self.per_node is not None):
            raise ValueError("backend vllm: leave out host and per_node")
        return self

    @property
    def size(self) -> int:
        """Number of instances."""
        return len(self.urls) or self.count

    @model_validator(mode="after")
    def _nodes_are_not_larger_than_the_pool(self) -> InstancePool:
        if self.per_node is not None and self.per_node > self.count:
            raise ValueError(f"per_node must be between 1 and its count, not {self.per_node}")
        return self


class ClusterFile(FileSection):
    """The contents of a cluster file."""

    pools: tuple[InstancePool, ...] = Field(description="instances by kind")
    model: str | None = Field(
        default=None, description="folder of the checkpoint, relative to the file; null: the embedded model"
    )
    placement: str = Field(default=DEFAULT, description="the placement policy")
    options: dict[str, Any] = Field(default_factory=dict, description="options of that policy")
    serve: dict[str, Any] = Field(
        default_factory=dict, description="settings of `headway serve`, for all instances and for the endpoint"
    )
    backends: Count = Field(default=16, description="slices of KV that an instance receives at a time")
    span_rows: Annotated[int, Field(ge=0)] = Field(
        default=SPAN_ROWS,
        description="most rows of a span that an instance computes at once (`core.request.cut`); 0: all",
    )
    group_decode: Literal["gather", "in-place"] | None = Field(
        default=None,
        description="where a decode on several instances goes on: on one of them, or in place over the KV of all; "
        "null: in place under `pecsched` and `loongserve`, as in their papers, else on one",
    )
    group_times: str | None = Field(
        default=None,
        description="a fit of Eq. (1) to what spans take on groups of these instances (`headway profile fit-eq1 LOG`), "
        "from the folder that the command runs in; null: derived from each instance's own measured times",
    )
    kv_connector: str = Field(
        default="auto",
        description="how KV moves between instances: `nixl`, `peers` (shared memory on one host, else TCP), or `auto` "
        "(`nixl` where it is installed, else `peers`)",
    )
    network_gbit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=10.0, description="bandwidth between two hosts, one way, that policies reckon with"
    )
    workload: dict[str, Any] = Field(
        default_factory=dict,
        description="of `headway simulate`: what arrives, as in [scenario files](scenario-file.md); without preset, "
        "trace and mix: prompts of 1/64 of the longest length, every tenth of 1/4, at half of the predicted load",
    )
    slo: dict[str, SloTargets] = Field(
        default_factory=dict, description="of `headway simulate`: what requests of a class are judged by, as there"
    )
    run: RunSection = Field(
        default=RunSection(), description="of `headway simulate`: its seeds, window and noise, as there"
    )

    @property
    def behind_http(self) -> bool:
        """Whether the instances are servers with vLLM's HTTP API."""
        return self.pools[0].backend == "vllm"

    @property
    def combination(self) -> PlacementCombination:
        """What the file combines, as far as it tells: instances may be of several processes (`instance_configs`)."""
        shapes = [PoolShape(pool.role, pool.size) for pool in self.pools]
        return PlacementCombination(self.placement, self.options, shapes, self.behind_http)

    @property
    def in_place(self) -> bool:
        """Whether groups decode where their KV lies, instead of gathering it on one instance."""
        return self.group_decode == "in-place" or (self.group_decode is None and self.placement in _IN_PLACE)

    @property
    def hosts(self) -> set[int]:
        """Those that instances are on."""
        return {pool.host for pool in self.pools}


def workload_of(file: ClusterFile, default: Mapping[str, Any], where: str) -> WorkloadSection:
    """Return the file's workload; `default`: what arrives, where it names neither preset, trace nor mix. Raises
    ConfigError."""
    named = file.workload.keys() & {"preset", "trace", "mix"}
    return validated(WorkloadSection, {**({} if named else default), **file.workload}, f"{where}: workload")


def cluster_file(data: Any, where: str) -> ClusterFile:
    """Validate plain data. ConfigError names the fields at fault and what is allowed there."""
    file = validated(ClusterFile, data, where)
    if not file.pools:
        raise ConfigError(f"{where}: pools is empty: name at least one, such as `- {{count: 2}}`")
    if len({pool.backend for pool in file.pools}) > 1:
        raise ConfigError(f"{where}: pools: some are of backend vllm and some are not; all have to be of one backend")
    try:
        check_connector(file.kv_connector)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    try:
        check_options(file.placement, file.options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if (refusal := file.combination.refusal()) is not None:
        raise ConfigError(f"{where}: {refusal}")
    if file.group_times is not None:
        _check_group_times(file, where)
    # What arrives by default only measured instances tell: any source will do here.
    workload_of(file, {"preset": "azure-conv-like"}, where)
    return file


def _check_group_times(file: ClusterFile, where: str) -> None:
    from headway.perf.latency import eq1

    if file.behind_http:
        raise ConfigError(
            f"{where}: group_times is of groups; instances of backend vllm serve whole requests: leave it out"
        )
    if file.placement == "pecsched" and file.options.get("fast_sp", True):
        raise ConfigError(
            f"{where}: group_times does not tell forms of sequence parallelism apart, and pecsched chooses by their "
            "cost: leave it out, or say `fast_sp: false`"
        )
    try:
        eq1.load(Path(str(file.group_times)))
    except ConfigError as error:
        raise ConfigError(f"{where}: group_times: {error}") from None


def check_hosts(file: ClusterFile, where: str, nnodes: int) -> None:
    """Raise ConfigError where the pools' hosts are not numbered without gaps, or `nnodes` is asked for besides."""
    if nnodes != 1:
        raise ConfigError(f"{where}: nnodes spreads the workers of one engine; in a cluster a pool says `host`")
    idle = sorted(set(range(1, max(file.hosts))) - file.hosts)
    if idle:
        raise ConfigError(f"{where}: there is a host {max(file.hosts)}, but no pool says `host: {idle[0]}`")


def first_of(file: ClusterFile) -> list[int]:
    """Return the number of each pool's first instance."""
    counts = [pool.count for pool in file.pools]
    # Instances are numbered through the pools in order.
    return [sum(counts[:i]) for i in range(len(counts))]


def nodes_of(file: ClusterFile) -> list[int]:
    """The node of each instance, in the order of the pools: first, those of the pools without `per_node`, one a host;
    then the others."""
    nodes: list[int] = []
    # Renumbered without gaps: a host may have only pools with `per_node`.
    common = sorted({pool.host for pool in file.pools if pool.per_node is None})
    following = len(common)
    for pool in file.pools:
        for number in range(pool.count):
            if pool.per_node is None:
                nodes.append(common.index(pool.host))
            else:
                nodes.append(following + number // pool.per_node)
        if pool.per_node is not None:
            following += -(-pool.count // pool.per_node)
    return nodes


def model_of(file: ClusterFile, folder: Path) -> str | None:
    """The checkpoint's folder; a relative one is beside the file."""
    return None if file.model is None else str(folder / file.model)
