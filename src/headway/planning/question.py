"""A planning question: a model, accelerators that may be used, a workload, and demands on its latencies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from headway.core.errors import ConfigError
from headway.core.file_sections import Count, FileSection, Positive, Seeds, validated
from headway.sim.scenario import LatencySection, MemorySection, ModelSection
from headway.sim.workload.section import WorkloadSection

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

    name: str = Field(description="name of an accelerator (headway.perf.hardware.accelerators)")
    most: Count = Field(default=8, description="how many there are")
    cost: Positive = Field(default=1.0, description="cost of one, in any unit, such as dollars an hour")


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
    t_target_s: tuple[Positive, ...] = Field(
        default=(0.025, 0.05, 0.1, 0.2), min_length=1, description="longest iterations aimed at, seconds"
    )
    effort: Count = Field(
        default=2_000_000,
        description="simulated requests on one level of cost; above it, candidates are first screened on a part of the "
        "workload",
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
        description="a named model (headway.perf.hardware.models), the path of a config.json, or a shape"
    )
    accelerators: tuple[AcceleratorsSection, ...] = Field(min_length=1, description="kinds that may be used")
    workload: WorkloadSection
    demands: dict[str, dict[str, Positive]] = Field(
        description="by class of requests (or `all`): METRIC_pNN_s: seconds, with METRIC ttft, tbt (all gaps), max_tbt "
        "(each request's worst gap), tpot or e2e, such as chat: {ttft_p99_s: 1.0}"
    )
    latency: LatencySection = LatencySection(source="fitted")
    memory: MemorySection = MemorySection()
    search: SearchSection = SearchSection()
    window_s: Positive | None = Field(default=None, description="arrivals of so many seconds; null: all of them")
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
