"""A planning question (model, accelerators, workload, demands) and the candidates that it allows, cheapest first."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import Aim, Count, FileSection, Machines, Positive, Seconds, Seeds, validated
from headway.core.parse import number
from headway.perf.hardware import ModelShape, ParallelLayout, accelerator, model, rank_shape
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.build import InfeasibleError, plan_memory
from headway.sim.scenario import LatencySection, MemorySection, ModelSection, Scenario, WorkloadSection, parse_scenario
from headway.sim.workload import TraceRequest

Metric = Literal["ttft", "tbt", "max_tbt", "tpot", "e2e"]
_DEMAND = re.compile(r"(ttft|tbt|max_tbt|tpot|e2e)_p(\d{1,2}(?:\.\d+)?)_s")


@dataclass(frozen=True)
class LatencyDemand:
    """One limit on a percentile of one class's latencies."""

    klass: str
    """Class of requests; "all": every request."""
    metric: Metric
    """`tbt` pools the gaps of all requests; `max_tbt` takes each request's worst gap."""
    percent: float
    limit_s: float

    @property
    def name(self) -> str:
        """Name in tables, such as "chat TTFT P99"."""
        words = {"ttft": "TTFT", "tbt": "TBT", "max_tbt": "worst TBT", "tpot": "TPOT", "e2e": "E2E"}
        return f"{self.klass} {words[self.metric]} P{self.percent:g}"


class AcceleratorsSection(FileSection):
    """Accelerators of one kind that a plan may use."""

    name: str = Field(description="name of an accelerator (headway.perf.hardware)")
    most: Machines = Field(default=8, description="how many there are")
    cost: Positive = Field(
        default=1.0,
        description="cost of one, in any unit, such as dollars an hour; 1: accelerators are counted",
    )


class SearchSection(FileSection):
    """What is tried."""

    tp: tuple[Count, ...] = Field(default=(1, 2, 4, 8), description="tensor-parallel ranks of an instance")
    stages: tuple[Count, ...] = Field(default=(1, 2, 4), description="pipeline stages of an instance")
    kvp: tuple[Count, ...] = Field(default=(1,), description="KV groups of an instance (native engine only)")
    shard_tokens: Count | None = Field(
        default=None,
        description="tokens of one request that a KV group holds before the next joins; null: as t_target_s allows",
    )
    split: bool = Field(
        default=True, description="try separate prefill and decode instances too (first free prefill instance)"
    )
    policies: tuple[str, ...] = Field(default=("ladder",), min_length=1, description="orders of waiting prefills")
    t_target_s: tuple[Aim, ...] = Field(
        default=(0.025, 0.05, 0.1, 0.2), min_length=1, description="longest iterations aimed at, seconds"
    )
    busiest_part: Count = Field(
        default=8,
        description="candidates are first simulated on the busiest of so many parts of the workload, if it has 200 "
        "requests or more; 1: they are not, and the search is exact",
    )
    front: bool = Field(default=False, description="go on to dearer plans, for the whole Pareto front")


class PlanQuestion(FileSection):
    """The file that `headway plan` reads."""

    name: str = Field(default="", description="what it is called in reports")
    about: str = Field(default="", description="what it stands for")
    model: str | ModelSection = Field(
        description="a named model (headway.perf.hardware), the path of a config.json, or a shape"
    )
    accelerators: tuple[AcceleratorsSection, ...] = Field(min_length=1, description="kinds that may be used")
    workload: WorkloadSection
    demands: dict[str, dict[str, Seconds]] = Field(
        description="by class of requests (or `all`): METRIC_pNN_s: seconds, with METRIC ttft, tbt (all gaps), max_tbt "
        "(each request's worst gap), tpot or e2e, such as chat: {ttft_p99_s: 1.0}"
    )
    latency: LatencySection = LatencySection(source="fitted", engine="vllm")
    memory: MemorySection = MemorySection()
    search: SearchSection = SearchSection()
    window_s: Seconds | None = Field(default=None, description="arrivals of so many seconds; null: all of them")
    seeds: Seeds = Field(default=(0,), description="a plan meets a demand if it does with each of these seeds")

    @model_validator(mode="after")
    def _demands_are_known(self) -> PlanQuestion:
        if not any(self.demands.values()):
            raise ValueError("`demands` is empty: without a limit the cheapest plan is none at all")
        for klass, limits in self.demands.items():
            for name in limits:
                if _DEMAND.fullmatch(name) is None:
                    raise ValueError(
                        f"demands.{klass}: {name!r} is not a demand; write METRIC_pNN_s with METRIC ttft, tbt, "
                        "max_tbt, tpot or e2e, such as ttft_p99_s"
                    )
        return self

    def demand_list(self) -> tuple[LatencyDemand, ...]:
        """Return the demands, in the file's order."""
        return tuple(
            LatencyDemand(klass, found[1], float(found[2]), limit_s)  # type: ignore[arg-type]
            for klass, limits in self.demands.items()
            for name, limit_s in limits.items()
            if (found := _DEMAND.fullmatch(name)) is not None
        )


KINDS: dict[str, tuple[dict[str, str], float, dict[str, str]]] = {
    "chat": (
        {"prompt": "lognormal:median=1500,p90=5000,max=8k", "output": "lognormal:median=100,p90=400"},
        1000.0,
        {"tbt_p99_s": "200ms"},
    ),
    "document": ({"prompt": "fixed:200k", "output": "fixed:500"}, 120_000.0, {}),
}
"""Kinds of requests that a question in flags may name: lengths, limit of TTFT's P90 (ms), further demands."""

_DRAWN = 800
"""Most requests of a question in flags; fewer where fewer have `_DOCUMENTS` documents and arrive for `_ARRIVALS_S`."""
_DOCUMENTS = 40
_ARRIVALS_S = 480.0
"""Four times the limit of documents, so that a queue which only grows is seen."""
_SEARCH = {"busiest_part": 4, "t_target_s": [0.05, 0.1, 0.2]}
"""Settings of the search for such a question. A limit of 200 ms on gaps needs no iterations of 25 ms, and simulating
those would take most of the time."""


def question_data(model: str, gpu: str, qps: str, mix: str, ttft_ms: str | None) -> dict[str, Any]:
    """Return the data of a question in flags, for `parse_question`. Raises ConfigError for a faulty mix or limit."""
    shares, rate = _by_kind(mix, "--mix", tuple(KINDS), ""), _above_zero(qps, "--qps")
    limits = {kind: KINDS[kind][1] for kind in shares}
    if ttft_ms is not None:
        limits |= _by_kind(ttft_ms, "--ttft-ms", tuple(shares), next(iter(shares)))
    kinds = [{"class": kind, "share": share, **KINDS[kind][0]} for kind, share in shares.items()]
    documents = shares.get("document", 0.0) / sum(shares.values())
    enough = max(_DOCUMENTS / documents, _ARRIVALS_S * rate) if documents else _DRAWN
    return {
        "model": model,
        "accelerators": [{"name": gpu}],
        "workload": {"qps": rate, "requests": math.ceil(min(_DRAWN, enough)), "mix": kinds},
        "demands": {kind: {"ttft_p90_s": limit / 1000, **KINDS[kind][2]} for kind, limit in limits.items()},
        "search": _SEARCH,
    }


def _by_kind(text: str, option: str, kinds: tuple[str, ...], alone: str) -> dict[str, float]:
    """Return the numbers in `chat:0.95,document:0.05`. kinds: those that may be named; alone: kind of a number without
    one; empty: it must have one."""
    pairs = [part.strip().rpartition(":") for part in text.split(",")]
    found = {kind or alone: value for kind, _, value in pairs}
    if not set(found) <= set(kinds) or len(found) < len(pairs):
        known = " or ".join(kinds)
        raise ConfigError(f"{option} {text!r}: write KIND:NUMBER,KIND:NUMBER, where KIND is {known}, each once")
    return {kind: _above_zero(value, f"{option} {text!r}") for kind, value in found.items()}


def _above_zero(text: str, flag: str) -> float:
    try:
        value = number(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if value <= 0:
        raise ConfigError(f"{flag}: {text} is not above 0")
    return value


def parse_question(data: Mapping[str, Any], where: str = "question") -> PlanQuestion:
    """Validate plain data. ConfigError lists every fault: its field, what is wrong, and what is allowed."""
    question = validated(PlanQuestion, dict(data), where)
    if question.latency.source == "table" and (
        set(question.search.tp) | set(question.search.stages) | set(question.search.kvp) != {1}
        or question.memory.kv_tokens is None
    ):
        raise ConfigError(
            f"{where}: a measured table holds for one layout on one machine: set search to tp: [1], stages: [1], kvp: "
            "[1], and memory.kv_tokens to what that machine's cache holds"
        )
    return question


@dataclass(frozen=True)
class DeploymentCandidate:
    """One deployment: equal instances of one layout."""

    accelerator: str
    tp: int
    stages: int
    kvp: int
    replicas: int
    """Instances that prefill, and decode too unless `decoders` is above 0."""
    decoders: int
    """Instances that only decode; 0: every instance does both."""
    policy: str
    t_target_s: float

    @property
    def accelerators(self) -> int:
        """Accelerators of all instances."""
        return (self.replicas + self.decoders) * self.tp * self.stages * self.kvp

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(tp=self.tp, stages=self.stages, kvp=self.kvp)

    @property
    def name(self) -> str:
        """Name in tables, such as "2 × tp4, lars, 50 ms"."""
        shape = f"tp{self.tp}" + (f" pp{self.stages}" if self.stages > 1 else "")
        shape += f" kvp{self.kvp}" if self.kvp > 1 else ""
        if self.decoders:
            return f"{self.replicas} prefill + {self.decoders} decode × {shape}"
        return f"{self.replicas} × {shape}, {self.policy}, {self.t_target_s * 1000:g} ms"

    def scenario(self, question: PlanQuestion) -> Scenario:
        """Return the scenario that simulates this candidate on the question's workload."""
        return parse_scenario(self.scenario_data(question), self.name)

    def scenario_data(self, question: PlanQuestion) -> dict[str, Any]:
        """Return the same as plain data, for a file that `headway simulate` reads."""
        dumped = question.model_dump(mode="json", by_alias=True, exclude_none=True)
        data: dict[str, Any] = {
            "name": self.name,
            "cluster": {"accelerator": self.accelerator},
            **{key: dumped[key] for key in ("model", "latency", "memory", "workload")},
            "policy": {"policy": self.policy, "chunking": "adaptive", "t_target_s": self.t_target_s},
            "slo": targets_of(question),
            "run": {"seeds": list(question.seeds)} | ({"window_s": question.window_s} if question.window_s else {}),
        }
        if not self.decoders:
            data["cluster"]["replicas"] = self.replicas
            data["layout"] = {"tp": self.tp, "stages": self.stages, "kvp": self.kvp}
            if self.kvp > 1 and question.search.shard_tokens is not None:
                data["layout"]["shard_tokens"] = question.search.shard_tokens
            return data
        pool = {"tp": self.tp, "stages": self.stages}
        data["cluster"] |= {
            "placement": "fixed-sp",
            "options": {"sp": 1},
            "pools": [
                {"role": "prefill", "count": self.replicas, **pool},
                {"role": "decode", "count": self.decoders, **pool},
            ],
        }
        return data


def targets_of(question: PlanQuestion) -> dict[str, dict[str, float]]:
    """Return the demands as objectives of single requests, which the scheduler orders by: of a class's limits on TTFT,
    TBT and so on the tightest. Demands on "all" are no objectives of a class."""
    names = {"ttft": "ttft_s", "max_tbt": "tbt_s", "tbt": "tbt_s", "tpot": "tpot_s", "e2e": "e2e_s"}
    targets: dict[str, dict[str, float]] = {}
    for demand in question.demand_list():
        if demand.klass != "all":
            mine, name = targets.setdefault(demand.klass, {}), names[demand.metric]
            mine[name] = min(demand.limit_s, mine.get(name, demand.limit_s))
    return targets


def shape_of(question: PlanQuestion) -> ModelShape:
    """Return the model's shape. Raises ConfigError, listing the names, for an unknown one."""
    if isinstance(question.model, ModelSection):
        return ModelShape(**question.model.model_dump())
    return model(question.model)


def candidates_of(question: PlanQuestion) -> Iterator[DeploymentCandidate]:
    """Yield every candidate that the numbers of accelerators, heads and layers allow; memory is not looked at."""
    search, shape = question.search, shape_of(question)
    for kind in question.accelerators:
        device = accelerator(kind.name)
        for tp, stages, kvp in itertools.product(*map(_distinct, (search.tp, search.stages, search.kvp))):
            layout = ParallelLayout(tp=tp, stages=stages, kvp=kvp)
            if tp > device.per_node or layout.accelerators > kind.most or not _divides(shape, layout):
                continue
            most = kind.most // layout.accelerators
            for replicas, policy, t_target_s in itertools.product(
                range(1, most + 1), dict.fromkeys(search.policies), _distinct(search.t_target_s)
            ):
                yield DeploymentCandidate(kind.name, tp, stages, kvp, replicas, 0, policy, t_target_s)
            # a prefill instance computes one prompt at a time: neither policy nor t_target_s matters
            # KV moves between instances that are cut by heads only (`placement.combinations`)
            if search.split and kvp == stages == 1:
                for prefill, decode in itertools.product(range(1, most), repeat=2):
                    if prefill + decode <= most:
                        policy, t_target_s = search.policies[0], search.t_target_s[0]
                        yield DeploymentCandidate(kind.name, tp, stages, kvp, prefill, decode, policy, t_target_s)


def cost_of(candidate: DeploymentCandidate, question: PlanQuestion) -> float:
    """Return accelerators × the cost of one."""
    each = next(kind.cost for kind in question.accelerators if kind.name == candidate.accelerator)
    return candidate.accelerators * each


def cost_unit(question: PlanQuestion) -> str:
    """Return the unit of costs, in words."""
    return "accelerators" if all(kind.cost == 1.0 for kind in question.accelerators) else "accelerators × their cost"


def memory_faults(
    question: PlanQuestion, candidates: Sequence[DeploymentCandidate], requests: Sequence[TraceRequest]
) -> dict[tuple[str, str], str]:
    """Return the layouts that do not fit, by (accelerator, layout's name), each with the numbers."""
    shape, faults = shape_of(question), {}
    if question.memory.kv_tokens is not None:
        return {}
    longest = (max(r.prompt_tokens for r in requests), max(r.prompt_tokens + r.output_tokens for r in requests))
    for name, layout_name in dict.fromkeys((c.accelerator, c.layout.name) for c in candidates):
        layout = ParallelLayout.named(layout_name)
        config = SchedulerConfig(stages=layout.stages, kv_parallel=layout.kvp)
        try:
            plan_memory(accelerator(name), shape, layout, config, longest, question.memory.utilisation)
        except InfeasibleError as error:
            faults[name, layout_name] = str(error)
    return faults


def _divides(shape: ModelShape, layout: ParallelLayout) -> bool:
    try:
        rank_shape(shape, layout)
    except ConfigError:
        return False
    return True


def _distinct(values: Sequence[Any]) -> list[Any]:
    return sorted(set(values))
