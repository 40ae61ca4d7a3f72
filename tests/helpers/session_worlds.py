"""Random sessions, and their texts as tokens."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.helpers.unit_latency import small_machine

from headway.policy.iteration.config import SchedulerConfig
from headway.sim import InstanceSpec
from headway.sim.prefix_cache import PrefixCacheSpec
from headway.sim.workload import TraceRequest
from headway.sim.workload.traces import PromptText, with_session_texts

BLOCK = 16


def sessions(rng: random.Random, count: int, apart_s: float) -> list[TraceRequest]:
    """Return requests of two sessions with two threads each; `apart_s`: mean time between arrivals."""
    requests: list[TraceRequest] = []
    at_s = 0.0
    prompts: dict[str, list[int]] = {"a": [], "b": []}
    for _ in range(count):
        session = rng.choice("ab")
        before = prompts[session]
        longest = rng.choice(before) if before and rng.random() < 0.8 else 0
        shared = rng.choice((longest, longest - longest % BLOCK, rng.randint(0, longest)))
        prompt = max(1, shared + rng.randint(0, 120))
        at_s += rng.expovariate(1 / apart_s)
        requests.append(
            TraceRequest(
                at_s, prompt, rng.randint(1, 40), cached_tokens=min(shared, prompt), session=session,
                thread=rng.choice("xy"), think_s=rng.random() * apart_s,
            )
        )  # fmt: skip
        before.append(prompt)
    # what is cached is left to the simulated cache
    return [replace(request, cached_tokens=0) for request in with_session_texts(requests, BLOCK)]


def tokens_of(text: PromptText) -> list[int]:
    """Return a text as token ids: equal where its pieces are equal."""
    tokens: list[int] = []
    for end, piece in text.pieces:
        tokens += [1000 * piece + place % 1000 for place in range(len(tokens), end)]
    return tokens


def cached_instance(kv_tokens: int, cache: PrefixCacheSpec | None, policy: str = "lars") -> InstanceSpec:
    config = SchedulerConfig(policy=policy)  # type: ignore[arg-type]
    return InstanceSpec(
        config=config, latency=small_machine(), kv_tokens=kv_tokens, block_tokens=BLOCK, prefix_cache=cache
    )
