"""The search space: every layout, number of instances and policy that the accelerators allow, cheapest first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.errors import ConfigError
from headway.perf.hardware.accelerators import accelerator
from headway.perf.hardware.models import model
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.layout import ParallelLayout, cut
from headway.planning.question import PlanQuestion
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.memory import InfeasibleError, plan_memory
from headway.sim.scenario import ModelSection, Scenario, parse_scenario
from headway.sim.workload import TraceRequest


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
            if search.split and kvp == 1:
                for prefill, decode in itertools.product(range(1, most), repeat=2):
                    if prefill + decode <= most:
                        policy, t_target_s = search.policies[0], search.t_target_s[0]
                        yield DeploymentCandidate(kind.name, tp, stages, kvp, prefill, decode, policy, t_target_s)


def cost_of(candidate: DeploymentCandidate, question: PlanQuestion) -> float:
    """Return accelerators × the cost of one."""
    each = next(kind.cost for kind in question.accelerators if kind.name == candidate.accelerator)
    return candidate.accelerators * each


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
        cut(shape, layout)
    except ConfigError:
        return False
    return True


def _distinct(values: Sequence[Any]) -> list[Any]:
    return sorted(set(values))
