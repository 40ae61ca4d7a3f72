"""A decode whose group a test grows and shrinks token by token."""

from __future__ import annotations

from collections.abc import Sequence

from tests.instance.instance_world import Part, World
from tests.instance.span_answers import Expected, check_answer

from headway.core.request import SamplingParams
from headway.runtime.engine.protocol import AbortRequest, OutputDelta

PARAMS = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}


class ScaledDecode:
    """A decode that a script scales as the router would. `held`: who has any of its KV; `parts`: its runs."""

    def __init__(self, world: World, name: str, prompt: list[int], count: int, parts: Sequence[Part]) -> None:
        self.world, self.name, self.prompt, self.count = world, name, prompt, count
        self.params = SamplingParams(**{**PARAMS, "max_tokens": count})
        self.deltas: list[OutputDelta] = []
        self.parts = list(parts)
        self.held: set[int] = set()
        if parts:
            self.deltas.append(world.prefill(name, prompt, parts, logprobs=0, max_tokens=count))
            self.held = {number for part in parts for number in part.group}

    @property
    def said(self) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas for token in delta.tokens)

    def step(self, group: tuple[int, ...], home: int | None = None, attn: str = "ring") -> None:
        """One token; all KV is with `group` then, the new token's with its first. ulysses: by heads, in its order."""
        gone = self.held - set(group)
        order = (group[0], *sorted((self.held | set(group)) - {group[0]}))
        if attn == "ulysses":
            assert not gone
            order = group
        joins = set(order) - self.held | ({home} if home is not None else set())
        self.world.admit(self.name, self.prompt, sorted(joins), self.params, self.said)
        self.parts.append(Part(1, order, attn, in_place=True, keepers=group if gone else ()))
        self.world.compute(self.name, self.parts, len(self.parts) - 1, drawn=self.said, home=home)
        word = self.world.done(self.name, self.parts[-1])
        assert word.delta is not None
        self.deltas.append(word.delta)
        for number in gone:
            self.world[number].tell(AbortRequest(self.name, for_good=False))
        self.held = set(group)

    def used(self, number: int) -> int:
        one = self.world[number]
        one.hear(0.3)
        return one.stats.kv_tokens_used

    def end(self, expected: Expected) -> None:
        check_answer(self.deltas, *expected(self.prompt, self.count))
        self.world.forget(self.name)
        self.world.clean()
