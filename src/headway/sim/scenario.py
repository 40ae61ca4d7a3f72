"""A scenario file: everything that a simulation depends on, validated. `headway simulate --schema` prints its schema.

Errors name the field by its path and what is allowed there. The sections are compiled in `build.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, create_model, field_validator, model_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import (
    Aim,
    Count,
    CountOrZero,
    FileSection,
    Machines,
    Positive,
    Seconds,
    SecondsOrZero,
    validated,
)
from headway.core.parse import size as memory_size
from headway.core.parse import tokens
from headway.perf.hardware import ParallelLayout
from headway.policy.iteration.config import FOLLOWS_FROM_LAYOUT, SchedulerConfig
from headway.policy.placement.combinations import PlacementCombination, PoolShape
from headway.policy.placement.registry import DEFAULT, check_options
from headway.sim.metrics import SloTargets
from headway.sim.prefix_cache import INFINITE
from headway.sim.spec import RunSection, VllmSection
from headway.sim.workload.generate import PRESETS
from headway.sim.workload.traces import MOST_REQUESTS, class_name


class ModelSection(FileSection):
    """The shape of a decoder. `mlp_matrices` is 3 for gated MLPs; `dtype_bytes` is of weights and KV."""

    layers: Count
    hidden: Count
    q_heads: Count
    kv_heads: Count
    head_dim: Count
    mlp: Count
    vocab: Count
    dtype_bytes: Count = 2
    tied_embeddings: bool = False
    mlp_matrices: Literal[2, 3] = 3


class PoolSection(FileSection):
    """Instances of one kind."""

    role: Literal["prefill", "decode", "mixed"] = "mixed"
    count: Machines = Field(description="instances")
    tp: Count = Field(default=1, description="tensor-parallel ranks of each")
    stages: Count = Field(default=1, description="pipeline stages of each")
    kvp: Machines = Field(default=1, description="KV groups of each, of `layout.shard_tokens`")
    per_node: Count | None = Field(default=None, description="instances on a node; null: as many as its devices allow")
    kv_tokens: Count | None = Field(
        default=None, description="tokens that each of its KV groups holds; null: what memory leaves"
    )

    @property
    def layout(self) -> ParallelLayout:
        """How each instance is cut."""
        return ParallelLayout(tp=self.tp, stages=self.stages, kvp=self.kvp)


class SpansSection(FileSection):
    """Where the times of spans on groups come from."""

    source: Literal["ring", "fast-sp", "tetris-table1", "eq1"] = Field(
        default="ring",
        description="ring: derived from one instance's latency; fast-sp: PecSched's hybrid sequence parallelism, at "
        "the roofline's shares of peak; tetris-table1: Eq. (1) fitted to Tetris's Table 1 "
        "(Llama-3 8B, A100); eq1: a file written by `headway profile fit-eq1`",
    )
    file: str | None = Field(default=None, description="the fit's file")
    node_gbit_s: Positive | None = Field(
        default=None, description="fast-sp: network of one whole node, Gb/s; null: a card an accelerator"
    )
    ring_loss: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.061, description="fast-sp: share of attention's rate that each doubling of a ring costs"
    )

    @model_validator(mode="after")
    def _file_with_eq1(self) -> SpansSection:
        if (self.source == "eq1") != (self.file is not None):
            raise ValueError("`file` goes with `source: eq1`, and only with it")
        return self


class ClusterSection(FileSection):
    placement: str | None = Field(
        default=None,
        description="a cluster policy (headway.policy.placement.registry); null: `ladder`, or without "
        "`pools`: `replicas`, least loaded first",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="settings of that policy")
    pools: tuple[PoolSection, ...] = Field(default=(), description="instances by kind; each pool begins on a new node")
    spans: SpansSection = SpansSection()
    backends: Count = Field(default=16, description="receive backends of an instance: KV transfers at a time")
    sends_layers: bool = Field(
        default=True,
        description="KV of a prompt that a scheduler computes is sent layer by layer meanwhile, as in the papers; "
        "false: all of it afterwards, as in `headway cluster`",
    )
    span_rows: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="most rows of a span that an instance computes at once, to be paused in between; 0: all",
    )
    kv_reservations: bool = Field(
        default=True, description="prompts and transfers wait for KV room on instances, as in `headway cluster`"
    )
    masters: Literal["one", "all"] = Field(
        default="one",
        description="members of a decoding group that compute linear layers: one all of it, or all a share",
    )
    network: str | None = Field(default=None, description="link across nodes; null: the accelerator's")
    accelerator: str = Field(default="a100-80gb", description="name of an accelerator (headway.perf.hardware)")
    replicas: Machines = Field(default=1, description="equal instances; an arrival joins the one with fewest requests")

    @model_validator(mode="before")
    @classmethod
    def _default_placement(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("pools") and data.get("placement") is None:
            return {**data, "placement": DEFAULT}
        return data

    @model_validator(mode="after")
    def _pools_with_placement(self) -> ClusterSection:
        if self.placement is None:
            if self.options:
                raise ValueError("`options` need a `placement`, and that needs `pools` of instances")
            return self
        if not self.pools:
            raise ValueError("a `placement` needs `pools` of instances")
        try:
            check_options(self.placement, self.options)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


class LayoutSection(FileSection):
    """The parallel layout of one instance."""

    tp: Count = Field(default=1, description="tensor-parallel ranks")
    stages: Count = Field(default=1, description="pipeline stages")
    kvp: Machines = Field(default=1, description="KV groups: full replicas that a long request's cache is spread over")
    shard_tokens: Count | None = Field(
        default=None, description="tokens of one request that a KV group holds; null: what policy.t_target_s allows"
    )
    link: str | None = Field(
        default=None, description="link between stages (headway.perf.hardware); null: the accelerator's"
    )


class RooflineSection(FileSection):
    """Shares of the data sheet's rates that are reached, and fixed costs."""

    linear: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.7, description="share of peak FLOP/s in matrix products"
    )
    attention: Annotated[float, Field(gt=0, le=1)] = Field(default=0.6, description="share of peak FLOP/s in attention")
    bandwidth: Annotated[float, Field(gt=0, le=1)] = Field(default=0.85, description="share of peak memory bandwidth")
    fixed_s: SecondsOrZero = Field(default=5e-4, description="fixed seconds of a stage in each iteration")
    per_layer_s: SecondsOrZero = Field(default=2.5e-5, description="fixed seconds of a layer in each iteration")
    per_decode_s: SecondsOrZero = Field(default=2e-8, description="seconds a decode and layer beside KV traffic")


class LatencySection(FileSection):
    source: Literal["roofline", "fitted", "table"] = Field(
        default="roofline",
        description="roofline: data sheet and efficiencies; fitted: constants that ship with Headway; "
        "table: a file written by `headway profile` (or `profile fit`), for one stage of this layout",
    )
    file: str | None = Field(default=None, description="the table's file")
    roofline: RooflineSection = RooflineSection()
    engine: Literal["headway", "vllm"] | None = Field(
        default=None,
        description="fitted: engine whose libraries compute; null: the scenario's. vllm with `engine: headway`: the "
        "policy runs as vLLM's plug-in",
    )
    front: str | None = Field(
        default=None,
        description="fitted: a file of `headway profile`, whose server's time in front of the engine (HTTP, "
        "tokenising) is added; null: the published one for vLLM, none for Headway's own engine",
    )
    learns: bool = Field(
        default=False, description="predictions correct themselves from what iterations took, as live ones do"
    )

    @model_validator(mode="after")
    def _file_with_table(self) -> LatencySection:
        if (self.source == "table") != (self.file is not None):
            raise ValueError("`file` goes with `source: table`, and only with it")
        return self


class MemorySection(FileSection):
    utilisation: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.9, description="share of device memory that may be used"
    )
    kv_tokens: Count | None = Field(
        default=None, description="tokens that the KV cache holds; null: what memory leaves"
    )
    block_tokens: Count = Field(default=64, description="tokens a KV block")


class PrefixCacheSection(FileSection):
    """KV of prompts that ended, kept for prompts that begin alike; what begins alike is in the trace.

    Requests that a placement gives to an instance's scheduler use and fill that instance's cache; spans on groups do
    neither."""

    size: Annotated[int, Field(ge=0)] | str = Field(
        default="pool",
        description="most unused KV that an instance keeps: pool (what its KV cache has room for), tokens, `40 GiB` "
        "or infinite; more than the pool stands for memory beside it, from which loading costs nothing; 0: no cache",
    )
    eviction: Literal["lru", "cost"] = Field(
        default="lru", description="lru: unused for longest first; cost: cheapest to compute again first, aged"
    )

    @field_validator("size")
    @classmethod
    def _known_size(cls, size: int | str) -> int | str:
        if isinstance(size, int) or size in ("pool", "infinite"):
            return size
        try:
            # Memory ends with B; what it is in tokens depends on the model.
            return size if size[-1:] in ("b", "B") and memory_size(size) else tokens(size)
        except ConfigError:
            words = f"must be pool, infinite, a number of tokens, or a memory such as 40 GiB, not {size!r}"
            raise ValueError(words) from None

    def tokens(self, bytes_per_token: int) -> int | None:
        """Return the size in tokens; None: what the pool has room for."""
        if isinstance(self.size, int):
            return self.size
        if self.size == "pool":
            return None
        return INFINITE if self.size == "infinite" else memory_size(self.size) // bytes_per_token


class MedhaSection(FileSection):
    """Medha's rules (`headway.policy.iteration.medha.MedhaConfig`)."""

    space_sharing: bool = Field(default=True, description="long prompts yield part of their time to shorter ones")
    long_tokens: CountOrZero = Field(default=8192, description="prompts above this are long")
    long_iterations: float | None = Field(
        default=None, description="so are prompts of more iterations alone; null: 4, in mode paper by tokens only"
    )
    exact_target: bool = Field(
        default=True, description="iterations take all of t_target_s, and no more where nothing decodes"
    )
    deadline_base_s: SecondsOrZero = Field(
        default=1.0, description="a first token is due after this, or deadline_factor times its prefill if that is more"
    )
    deadline_factor: float = Field(default=5.0, description="see deadline_base_s; Medha defines no deadline")


def _policy_section() -> type[FileSection]:
    """Every field of `SchedulerConfig`, optional; the stages and KV groups are the layout's."""
    kinds: dict[str, Any] = {"int": CountOrZero | None, "float | None": Aim | None}
    given: dict[str, Any] = {
        f.name: (
            kinds.get(str(f.type), f"{f.type} | None"),
            Field(None, description=str(f.metadata.get("help", "")).strip()),
        )
        for f in fields(SchedulerConfig)
        if f.name not in FOLLOWS_FROM_LAYOUT and f.name != "medha"
    }
    given["mode"] = (Literal["default", "paper"], Field("default", description="paper: Medha's scheduler as printed"))
    given["medha"] = (MedhaSection | None, Field(None, description="Medha's rules; null: with policy lars only"))
    return create_model(
        "PolicySection", __base__=FileSection, __doc__="Settings of the scheduler that differ from its mode's.",
        __module__="headway.policy.iteration.config", **given,
    )  # fmt: skip


PolicySection: Any = _policy_section()
# where pickle finds the class, so that scenarios can be sent to other processes
PolicySection.__module__ = __name__


# The `workload` of a scenario file, a plan's question or an accelerator file, validated; `sim.build` draws it.

Requests = Annotated[Count, Field(le=MOST_REQUESTS)]


class SessionsSection(FileSection):
    """A trace's sessions, closed: the next request of a thread comes after the answer before it and the think time."""

    count: Count | None = Field(default=None, description="sessions, the first of the trace; null: all")
    turns: Count | None = Field(default=None, description="requests of a session, the first; null: all")
    think: Annotated[float, Field(ge=0)] = Field(default=1.0, description="think times of the trace times this")
    max_think_s: Seconds | None = Field(default=None, description="longer think times are cut to this, in seconds")


def _as_text(value: object) -> object:
    """Return a bare number as the length specification that it means."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Lengths = Annotated[str, BeforeValidator(_as_text)]


class MixSection(FileSection):
    """One kind of request. Lengths: 200 or fixed:200, uniform:100-500, lognormal:median=…,p90=… (or mu, sigma; min,
    max), empirical:FILE, mix:0.95*SPEC+0.05*SPEC; k is 1,000 and K 1,024, as everywhere."""

    share: Positive = 1.0
    klass: Annotated[str, AfterValidator(class_name)] = Field(default="", alias="class")
    prompt: Lengths
    output: Lengths

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class WorkloadSection(FileSection):
    """Exactly one of preset, trace and mix."""

    preset: str | None = Field(default=None, description=f"a named mix: {', '.join(PRESETS)}")
    trace: str | tuple[str, ...] | None = Field(
        default=None,
        description="a trace file or a server's event log, or several that ran together; own arrival times unless "
        "`arrivals` is given",
    )
    mix: tuple[MixSection, ...] | None = Field(default=None, description="kinds of requests with shares and lengths")
    arrivals: Literal["poisson", "gamma", "constant", "trace", "at-once"] | None = Field(
        default=None, description="null: the trace's own, poisson otherwise; at-once: all at time 0"
    )
    qps: Positive | None = Field(
        default=None, description="requests per second; a trace's own times are stretched to it"
    )
    cv: Positive = Field(default=2.0, description="coefficient of variation of gamma arrivals")
    requests: Requests | None = Field(default=None, description="how many; null: as many as arrive in the window")
    draws: Requests | None = Field(
        default=None,
        description="requests drawn before the window cuts them; with the same number, loads differ in arrival times "
        "only (a sweep of qps does that); null: enough for the window",
    )
    concurrency: Count | None = Field(
        default=None,
        description="users, each of which sends its next request when it has the answer to the one before; in place of "
        "arrival times",
    )
    sessions: SessionsSection | None = Field(
        default=None,
        description="play the trace's sessions closed; they start by `arrivals` (poisson) at `qps` sessions a second",
    )
    slice: str | None = Field(default=None, description="part of a trace: 100:400 (requests) or 60s:120s")
    long_threshold: Count = Field(
        default=8192, description="prompts above this are of class long where no class is given"
    )
    long_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="share of requests that are replaced by requests of `long_preset`"
    )
    long_preset: str = Field(default="medha-swe", description="what they are replaced by")
    long_rule: Literal["p95-uniform", "linear-4096"] | None = Field(
        default=None,
        description="PecSched's rewriting of the longest prompts to 100K to 500K: those above the 95th percentile, "
        "uniformly; or those of 4,096 and more, in proportion",
    )
    max_prompt: Count | None = Field(default=None, description="longer prompts are cut to this")
    max_output: Count | None = Field(default=None, description="longer outputs are cut to this")

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadSection:
        given = [name for name in ("preset", "trace", "mix") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of preset, trace and mix, not {' and '.join(given) or 'none'}")
        if not getattr(self, given[0]):
            raise ValueError(f"`{given[0]}` is empty: fill it in, or give another of preset, trace and mix")
        if self.arrivals == "trace" and self.trace is None:
            raise ValueError("`arrivals: trace` needs a trace")
        if self.concurrency and (self.qps or self.arrivals or self.sessions):
            raise ValueError("`concurrency` takes the place of qps, arrivals and sessions: leave those out")
        others = (self.slice, self.requests, self.long_rule, self.long_share)
        if self.sessions is not None and (self.trace is None or self.arrivals == "trace" or any(others)):
            raise ValueError(
                "`sessions` needs a trace, and goes with none of slice, requests, long_rule, long_share and "
                "`arrivals: trace`"
            )
        return self


class Scenario(FileSection):
    """One simulation."""

    name: str = Field(default="", description="what it is called in reports")
    about: str = Field(default="", description="what it stands for, and where its latencies come from")
    cluster: ClusterSection = ClusterSection()
    model: str | ModelSection = Field(
        default="llama-3-8b",
        description="a named model (headway.perf.hardware), the path of a config.json, or a shape",
    )
    layout: LayoutSection = LayoutSection()
    latency: LatencySection = LatencySection()
    memory: MemorySection = MemorySection()
    prefix_cache: PrefixCacheSection | None = Field(
        default=None, description="null: nothing is kept, and `cached_tokens` of a trace count as cached"
    )
    engine: Literal["headway", "vllm"] = Field(
        default="headway", description="headway: the native engine, with `policy`; vllm: vLLM 0.32, with `vllm`"
    )
    policy: PolicySection = PolicySection()
    vllm: VllmSection = VllmSection()
    workload: WorkloadSection
    slo: dict[str, SloTargets] = Field(default_factory=dict, description="by class")
    run: RunSection = RunSection()
    sweep: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="values by field, such as policy.policy: [ladder, fcfs]: `headway simulate` runs them all, unless "
        "`--set` fixes the field or `--sweep` names others",
    )

    @model_validator(mode="after")
    def _fields_of_the_engine(self) -> Scenario:
        given = self.model_fields_set
        if self.run.refuse_late and (self.engine == "vllm" or self.cluster.placement is not None):
            raise ValueError("`run.refuse_late` is of Headway's own engine without `cluster.placement`: leave it out")
        if self.prefix_cache is not None and (self.engine == "vllm" or self.layout.kvp > 1):
            raise ValueError("`prefix_cache` is of Headway's own engine with one KV group: leave it out")
        if self.cluster.placement is not None and (refusal := self.combination.refusal()) is not None:
            raise ValueError(refusal)
        if self.engine == "headway":
            if "vllm" in given:
                raise ValueError("`vllm` needs `engine: vllm`")
            return self
        if "policy" in given:
            raise ValueError("`policy` is of Headway's own engine; with `engine: vllm` write `vllm.headway`")
        pools = self.cluster.pools
        if any(pool.role != "mixed" for pool in pools):
            raise ValueError("`engine: vllm` is simulated without pools of role prefill")
        cuts: list[LayoutSection | PoolSection] = [self.layout, *pools]
        if any(cut.stages > 1 or cut.kvp > 1 for cut in cuts):
            raise ValueError("`engine: vllm` is simulated with one stage and one KV group: set tp only")
        return self

    @property
    def combination(self) -> PlacementCombination:
        """What the cluster combines; with a `cluster.placement` only."""
        cluster = self.cluster
        shapes = [PoolShape(pool.role, pool.count, pool.tp, pool.stages, pool.kvp) for pool in cluster.pools]
        return PlacementCombination(cluster.placement or DEFAULT, cluster.options, shapes, self.engine == "vllm")


def parse_scenario(data: Any, where: str = "scenario") -> Scenario:
    """Validate plain data. ConfigError lists every fault: its field, what is wrong, and what is allowed."""
    return validated(Scenario, data, where)
