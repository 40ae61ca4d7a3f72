"""The convoy experiment: latency of short prompts that arrive at a fixed interval while one long prompt is prefilled.

One run measures one server in one configuration:
1. warm-up: a few shorts in sequence (the last ones give the latency of a short alone), then one long prompt, because
   the first one is slowed by first use of memory,
2. a long prompt without shorts: `alone_s`,
3. the convoy: another long prompt of the same length at t = 0, and a short one per interval until the long one's first
   token. Percentiles are over the shorts sent in that time, however late their answers.
Prompts are distinct random token ids, so that no prefix cache helps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from headway.core.errors import HeadwayError
from headway.serving.load.client import LoadClient, LoadRequest, TargetEndpoint
from headway.serving.load.prompts import PromptPool
from headway.sim.metrics import RequestRecord
from headway.sim.metrics.definitions import ttft_s
from headway.sim.metrics.quantiles import quantile


class ConvoyError(HeadwayError):
    """The long prompt or a warm-up request failed; the message has the request and its error."""


@dataclass(frozen=True, kw_only=True)
class ConvoyPlan:
    """Requests of one run. Lengths in tokens."""

    long_tokens: int
    long_output: int = 1
    short_tokens: int = 200
    short_output: int = 16
    short_interval_s: float = 1.0
    warmup: int = 5
    """Shorts sent before the measurement."""
    repeat: int = 1
    """Convoys; their shorts are pooled."""
    shared_prefix: int = 0
    """Tokens at the start that all prompts share, for which a prefix cache helps."""
    alone: bool = True
    """Whether the long prompt is measured without shorts as well."""
    max_s: float = 600.0
    """Seconds after which no more shorts are sent, so that a run on an overloaded server ends."""
    seed: int = 0
    """Decides all prompts."""


@dataclass(frozen=True)
class ConvoyResult:
    """Records of one convoy."""

    long: RequestRecord
    shorts: tuple[RequestRecord, ...]
    """Those sent before the long prompt's first token, in order."""
    cut_short: bool = False
    """Whether `ConvoyPlan.max_s` ended the shorts before the long prompt's first token."""


class ConvoyRound(NamedTuple):
    """One repeat."""

    alone: RequestRecord | None
    """The long prompt without shorts, where it was measured."""
    convoy: ConvoyResult


@dataclass(frozen=True, kw_only=True)
class ConvoyRun:
    """All measurements with one server."""

    convoys: tuple[ConvoyResult, ...]
    """One per repeat."""
    longs_alone: tuple[RequestRecord, ...]
    """One per repeat; empty when the plan's `alone` is False."""
    shorts_alone: tuple[RequestRecord, ...] = ()
    """The warm-up's shorts."""

    @property
    def shorts(self) -> list[RequestRecord]:
        """Shorts of all repeats, pooled."""
        return [short for convoy in self.convoys for short in convoy.shorts]

    @property
    def long_s(self) -> float | None:
        """Median over repeats of the long prompt's TTFT among shorts."""
        return quantile([s for convoy in self.convoys if (s := ttft_s(convoy.long)) is not None], 50)

    @property
    def alone_s(self) -> float | None:
        """Median over repeats of the long prompt's TTFT alone."""
        return quantile([s for record in self.longs_alone if (s := ttft_s(record)) is not None], 50)

    @property
    def short_alone_s(self) -> float | None:
        """Median TTFT of a short alone, without the first one, which includes the server's one-time work."""
        return quantile(
            [s for record in self.shorts_alone[1:] if (s := ttft_s(record)) is not None],
            50,
        )

    @classmethod
    def of(cls, shorts_alone: Sequence[RequestRecord], rounds: Sequence[ConvoyRound]) -> ConvoyRun:
        """Return the measurements of these rounds."""
        return cls(
            convoys=tuple(one.convoy for one in rounds),
            longs_alone=tuple(one.alone for one in rounds if one.alone is not None),
            shorts_alone=tuple(shorts_alone),
        )


Say = Callable[[str], None]


@dataclass
class PromptSource:
    """Makers of a convoy's requests: random ids for `headway bench`, texts for the demo."""

    long: Callable[[], LoadRequest]
    short: Callable[[], LoadRequest]


def random_prompts(plan: ConvoyPlan, vocab_size: int) -> PromptSource:
    """Make a source of prompts of random ids, drawn with the plan's seed."""
    pool = PromptPool(
        np.random.default_rng(plan.seed),
        vocab_size,
        max(plan.long_tokens, plan.short_tokens),
    )

    start = pool.place() if plan.shared_prefix else 0

    def job(klass: str, tokens: int, output: int) -> LoadRequest:
        return LoadRequest(
            id="",
            klass=klass,
            prompt=pool.json_sharing(tokens, plan.shared_prefix, start) if plan.shared_prefix else pool.json(tokens),
            prompt_tokens=tokens,
            output_tokens=output,
        )

    return PromptSource(
        long=lambda: job("long", plan.long_tokens, plan.long_output),
        short=lambda: job("short", plan.short_tokens, plan.short_output),
    )


@dataclass
class ConvoyRunner:
    """Runner of a plan against one endpoint. say: called with lines of progress."""

    endpoint: TargetEndpoint
    plan: ConvoyPlan
    prompts: PromptSource
    say: Say = field(default=lambda line: None)

    async def run(self) -> ConvoyRun:
        """Run the experiment. A failed short becomes a record; raises ConvoyError for any other failed request."""
        async with LoadClient(self.endpoint) as client:
            shorts_alone = await self.warm_up(client)
            rounds = [await self.round(client, number) for number in range(self.plan.repeat)]
        return ConvoyRun.of(shorts_alone, rounds)

    async def warm_up(self, client: LoadClient) -> list[RequestRecord]:
        """Send the plan's shorts one after the other, then a long prompt where it will be measured alone."""
        shorts_alone = [await self._one(client, self.prompts.short(), f"warm-{i}") for i in range(self.plan.warmup)]
        self.say(f"warm-up: {self.plan.warmup} shorts")
        if self.plan.warmup and self.plan.alone:
            cold = await self._one(client, self.prompts.long(), "warm-long")
            self.say(f"warm-up: a long prompt, {ttft_s(cold) or 0.0:.2f} s")
        return shorts_alone

    async def round(self, client: LoadClient, number: int) -> ConvoyRound:
        """Measure the long prompt alone, where the plan says so, and a convoy."""
        alone = None
        if self.plan.alone:
            alone = await self._one(client, self.prompts.long(), f"long-alone-{number}")
            self.say(f"long prompt alone: {ttft_s(alone) or 0.0:.2f} s")
        convoy = await self._convoy(client, number)
        self.say(f"long prompt among {len(convoy.shorts)} shorts: {ttft_s(convoy.long) or 0.0:.2f} s")
        return ConvoyRound(alone, convoy)

    async def _one(self, client: LoadClient, job: LoadRequest, name: str) -> RequestRecord:
        client.restart_clock()
        return _checked(await client.send(_named(job, name, 0.0)))

    async def _convoy(self, client: LoadClient, number: int) -> ConvoyResult:
        # Set at the long prompt's first token, or at its end when it fails before.
        read = asyncio.Event()
        client.restart_clock()
        long = asyncio.create_task(
            client.send(_named(self.prompts.long(), f"long-{number}", 0.0), lambda _: read.set())
        )
        long.add_done_callback(lambda _: read.set())
        shorts: list[asyncio.Task[RequestRecord]] = []
        try:
            while True:
                due_s = self.plan.short_interval_s * (len(shorts) + 1)
                if due_s > self.plan.max_s:
                    self.say(f"no more shorts after {self.plan.max_s:g} s; waiting for the long prompt")
                    break
                # Made before the wait, so that building the prompt does not delay its sending.
                job = _named(self.prompts.short(), f"short-{number}-{len(shorts)}", due_s)
                if await _set_before(read, due_s - client.now()):
                    break
                shorts.append(asyncio.create_task(client.send(job)))
            # Before the long prompt is awaited, which would set the event.
            cut_short = not read.is_set()
            return ConvoyResult(_checked(await long), tuple([await task for task in shorts]), cut_short)
        finally:
            # On an error or Ctrl-C no request outlives the experiment; finished tasks are not affected.
            for task in (long, *shorts):
                task.cancel()


async def alternate(runners: Sequence[ConvoyRunner], seconds: float) -> list[ConvoyRun]:
    """Run convoys against several endpoints in turn, so that what else the machine does meets all alike.

    Each gets as many: at least one, and no further round that would end later than `seconds` after the start."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(LoadClient(runner.endpoint)) for runner in runners]
        began_s = time.monotonic()
        warm = [await runner.warm_up(client) for runner, client in zip(runners, clients, strict=True)]
        rounds: list[list[ConvoyRound]] = [[] for _ in runners]
        while True:
            round_s = time.monotonic()
            for runner, client, done in zip(runners, clients, rounds, strict=True):
                done.append(await runner.round(client, len(done)))
            now_s = time.monotonic()
            if now_s - began_s + (now_s - round_s) > seconds:
                break
    return [ConvoyRun.of(shorts, done) for shorts, done in zip(warm, rounds, strict=True)]


async def _set_before(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, at most `seconds`; return whether it is set."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        pass
    return event.is_set()


def _named(job: LoadRequest, name: str, due_s: float) -> LoadRequest:
    return replace(job, id=name, due_s=due_s)


def _checked(record: RequestRecord) -> RequestRecord:
    if not record.ok:
        raise ConvoyError(f"request {record.id} ({record.prompt_tokens} tokens) failed: {record.error}")
    return record
