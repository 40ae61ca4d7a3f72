"""Which placements work on which pools and backends. For each combination that does not work: a sentence that says why.

The readers of cluster files and of scenarios both ask `PlacementCombination`: what is simulated can be served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.policy.placement.contract import Role
from headway.policy.placement.registry import names

_WHOLE = ("fifo", "priority", "reservation")
"""Policies that give every request whole to one instance, where `long_sp` is 1, and decode where they prefill."""
_SIZES = ("sp", "long_sp", "reserved")
"""Options that are numbers of instances that prefill."""
WHOLE_REQUESTS = (
    "serve whole requests, of role mixed, under ladder or jsq, or under fifo, priority or reservation with `long_sp: 1`"
)
"""What instances that move no KV do."""


@dataclass(frozen=True)
class PoolShape:
    """Equal instances of one role."""

    role: Role = "mixed"
    count: int = 1
    tp: int = 1
    stages: int = 1
    kvp: int = 1


@dataclass(frozen=True)
class PlacementCombination:
    """A placement on pools of one backend."""

    placement: str
    options: Mapping[str, Any]
    """Already checked as those of the placement."""
    pools: Sequence[PoolShape]
    over_http: bool = False
    """Whether the instances are vLLM servers, else Headway's own."""

    def refusal(self) -> str | None:
        """Return why it is not served, in a sentence; None: it is served. A policy of a user's own is not judged by its
        options: what it cannot have is refused, action by action."""
        return next(self._refusals(), None)

    @property
    def whole_prompts(self) -> bool:
        """Whether `ladder` gives each prompt whole to one instance: where none has another role than mixed."""
        return self.placement == "ladder" and (self.over_http or all(pool.role == "mixed" for pool in self.pools))

    @property
    def moves_kv(self) -> bool:
        """Whether prompts are spread over several instances, or KV moves between them: that needs instances without
        pipeline stages and KV groups."""
        spreads = self.placement != "jsq" and not self.whole_prompts and not self._long_alone
        return spreads or any(pool.role != "mixed" for pool in self.pools)

    @property
    def _long_alone(self) -> bool:
        return self.placement in _WHOLE and self.options.get("long_sp", 4) == 1

    @property
    def _computes_alone(self) -> bool:
        """Whether each prompt is computed by one instance alone, though its KV may go on to another: they may then be
        of different tensor-parallel sizes."""
        if self.placement == "tetris":
            return list(self.options.get("sizes") or ()) == [1]
        if self.placement == "fixed-sp":
            return self.options.get("sp") == 1
        return self.placement == "jsq" or self.whole_prompts or self._long_alone

    @property
    def _disaggregates(self) -> bool:
        return self.placement == "pecsched" and bool(self.options.get("disaggregate", True))

    def _refusals(self) -> Iterator[str]:
        name, roles = self.placement, {pool.role for pool in self.pools}
        if self.over_http:
            yield from self._refusals_over_http(roles)
            return
        if roles == {"decode"}:
            yield "pools: all are of role decode; one has to prefill (role prefill or mixed)"
        prefill = sum(pool.count for pool in self.pools if pool.role in (roles - {"decode"}))
        for option in _SIZES:
            size = self.options.get(option)
            if isinstance(size, int) and size > prefill:
                yield f"options.{option} is {size}, and of the pools' instances {prefill} can prefill"
        sizes = self.options.get("sizes")
        if sizes and min(sizes) > prefill:
            yield f"options.sizes names none up to {prefill}, and of the pools' instances {prefill} can prefill"
        if name == "jsq" and roles != {"mixed"}:
            yield "jsq gives whole requests to instances of role mixed; pools of other roles do nothing"
        if "decode" not in roles and self._disaggregates:
            yield (
                "pecsched decodes elsewhere than it prefills: give a pool the role decode, or say `disaggregate: false`"
            )
        yield from self._refusals_of_shapes()

    def _refusals_over_http(self, roles: set[Role]) -> Iterator[str]:
        if "decode" in roles:
            yield "pools: servers of backend vllm have no role decode: leave out role, unless it is prefill"
        if roles == {"prefill"}:
            yield "pools: all are of role prefill; one has to decode (leave out its role)"
        if self.placement in names() and self.placement not in ("ladder", "jsq"):
            yield (
                f"{self.placement} does not work on instances of backend vllm, which serve whole requests: use ladder "
                "or jsq"
            )

    def _refusals_of_shapes(self) -> Iterator[str]:
        sizes: dict[int, int] = {}
        for i, pool in enumerate(self.pools):
            # KV moves between instances whose ranks are cut by heads only.
            if pool.stages * pool.kvp > 1 and self.moves_kv:
                yield (
                    f"pools[{i}] is of instances with pipeline stages or KV groups (pipeline- or kv-parallel-size "
                    f"above 1): these {WHOLE_REQUESTS}"
                )
            if pool.role != "decode":
                sizes.setdefault(pool.tp, i)
        if len(sizes) > 1 and not self._computes_alone:
            (one, first), (other, second), *_ = sizes.items()
            yield (
                f"tensor-parallel-size is {one} in pools[{first}] and {other} in pools[{second}]: instances that "
                "compute a prompt together must be of the same. Others go under jsq, under fifo, priority or "
                "reservation with `long_sp: 1`, under fixed-sp with `sp: 1`, and under tetris with `sizes: [1]`"
            )

    def idle_pools(self) -> list[str]:
        """Return a sentence for each pool that the policy never uses. They are allowed: a comparison of policies wants
        the same instances under all of them."""
        policy = self.placement
        if policy == "pecsched" and not self._disaggregates:
            policy = "pecsched with `disaggregate: false`"
        elif policy not in _WHOLE:
            return []
        decodes = (i for i, pool in enumerate(self.pools) if pool.role == "decode")
        return [f"pools[{i}] is of role decode and does nothing: {policy} decodes where it prefills" for i in decodes]
