"""Clusters and requests for PecSched's tests: the drill for decisions, the cluster simulator for tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from headway.core.request import Request
from headway.perf.hardware import NetworkLink, model
from headway.perf.latency.groups import GroupShape
from headway.policy.placement.contract import ClusterInstance, ClusterLinks, ClusterState
from headway.policy.placement.pecsched.policy import PecSched, PecSchedOptions
from headway.policy.placement.registry import PolicyContext
from headway_research.pecsched.drill import DrillResult, PlacementDrill
from headway_research.pecsched.literal import LiteralPecSched

LINK = NetworkLink(name="test", bytes_per_s=1e9, latency_s=0.0, source="test", efficiency=1.0)
SHAPE = model("mistral-7b")


class Linear:
    """`GroupLatency`: 0.1 ms a token, divided by the group's size; plain rings take 1.3 times as long."""

    source = "test"

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        return tokens * 1e-4 / group.sp * (1.3 if group.strategy.attn == "ring" else 1.0)

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        return int(budget_s * 1e4 * group.sp)


def book(replicas: int, decodes: int = 2, per_node: int = 4) -> ClusterState:
    first = [ClusterInstance(id=i, node=i // per_node, role="prefill", capacity=1 << 20) for i in range(replicas)]
    rest = [ClusterInstance(id=replicas + i, node=1000 + i, role="decode", capacity=1 << 20) for i in range(decodes)]
    return ClusterState([*first, *rest], ClusterLinks(inside=LINK, across=LINK))


def policy(literal: bool = False, **options: Any) -> PecSched:
    given = {"long_replicas": "fixed", "long_sp": 3, "long_tokens": 10_000, "batch_tokens": 2000, **options}
    kind = LiteralPecSched if literal else PecSched
    return kind(PolicyContext(latency=Linear(), shape=SHAPE), PecSchedOptions(**given))


def requests(rng: random.Random, count: int, gap_s: float, long_share: float = 0.1) -> list[Request]:
    """Short ones of 50 to 3,000 tokens, long ones of 11,000 to 90,000; some at the same instant."""
    made, at = [], 0.0
    for i in range(count):
        at += rng.choice((0.0, rng.expovariate(1 / gap_s)))
        long = rng.random() < long_share
        tokens = rng.randint(11_000, 90_000) if long else rng.randint(50, 3000)
        name = f"{'l' if long else 's'}{i}"
        made.append(Request(id=name, arrival_s=at, prompt_tokens=tokens, max_output_tokens=rng.choice((1, 20))))
    return made


def drilled(policy: PecSched, work: Sequence[Request], replicas: int, until_s: float = float("inf")) -> DrillResult:
    return PlacementDrill(policy, book(replicas), Linear(), layers=8, decode_s=0.5, keep_actions=True).run(
        work, until_s
    )
