"""The convoy: one long prompt, and short ones at a steady beat while it is being read. How long do the short ones wait?

One run is one server in one configuration:
1. warm-up: a few shorts one after another (the last ones give the time of a short alone), then one long prompt (the
   first one pays for memory touched for the first time: without it "alone" would look slow and the convoy cheap),
2. the long prompt alone, the shorts absent: `alone_s`,
3. the convoy: another long prompt of the same length at t = 0, a short one at every interval until the long one's first
   token. Percentiles are over the shorts *sent* in that time, however late they were answered.
Prompts are random token ids, all different, so that no prefix cache helps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from headway.core.errors import HeadwayError
from headway.serving.load.client import LoadClient, LoadRequest, TargetEndpoint
from headway.serving.load.prompts import PromptPool
from headway.sim.metrics import RequestRecord
from headway.sim.metrics.definitions import ttft_s
from headway.sim.metrics.quantiles import quantile


class ConvoyError(HeadwayError):
    """The experiment could not be finished: the long prompt, or a warm-up, failed. The message says why."""


@dataclass(frozen=True, kw_only=True)
class ConvoyPlan:
    """What to send. Tokens as counts, intervals in seconds; `seed` decides every prompt; `alone` measures
    the long prompt alone too.
    After `max_s` no more shorts are sent, so that a server which they overload comes to an end too."""

    long_tokens: int
    long_output: int = 1
    short_tokens: int = 200
    short_output: int = 16
    short_interval_s: float = 1.0
    warmup: int = 5
    repeat: int = 1
    alone: bool = True
    max_s: float = 600.0
    seed: int = 0


@dataclass(frozen=True)
class ConvoyResult:
    """One convoy as it went; the shorts are those sent before the long one's first token, in order. `cut_short`: the
    plan's `max_s` ended the shorts before the long prompt was read."""

    long: RequestRecord
    shorts: tuple[RequestRecord, ...]
    cut_short: bool = False


@dataclass(frozen=True, kw_only=True)
class ConvoyRun:
    """All that was measured with one server: convoys (one a repeat), long prompts alone (as many), shorts alone."""

    convoys: tuple[ConvoyResult, ...]
    longs_alone: tuple[RequestRecord, ...]
    shorts_alone: tuple[RequestRecord, ...] = ()

    @property
    def shorts(self) -> list[RequestRecord]:
        """Those of all repeats, pooled."""
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
        """Median TTFT of a short alone, the first one left out (it pays for whatever the server does once)."""
        return quantile(
            [s for record in self.shorts_alone[1:] if (s := ttft_s(record)) is not None],
            50,
        )


Say = Callable[[str], None]


@dataclass
class PromptSource:
    """Where a convoy's prompts come from; the default ones are random ids, the demo's are texts."""

    long: Callable[[], LoadRequest]
    short: Callable[[], LoadRequest]


def random_prompts(plan: ConvoyPlan, vocab_size: int) -> PromptSource:
    """Prompts of random ids, from the plan's seed."""
    pool = PromptPool(
        np.random.default_rng(plan.seed),
        vocab_size,
        max(plan.long_tokens, plan.short_tokens),
    )

    def job(klass: str, tokens: int, output: int) -> LoadRequest:
        return LoadRequest(
            id="",
            klass=klass,
            prompt=pool.json(tokens),
            prompt_tokens=tokens,
            output_tokens=output,
        )

    return PromptSource(
        long=lambda: job("long", plan.long_tokens, plan.long_output),
        short=lambda: job("short", plan.short_tokens, plan.short_output),
    )


@dataclass
class ConvoyRunner:
    """Runs a plan against one endpoint. `say` gets a line of progress now and then."""

    endpoint: TargetEndpoint
    plan: ConvoyPlan
    prompts: PromptSource
    say: Say = field(default=lambda line: None)

    async def run(self) -> ConvoyRun:
        """The whole experiment; raises ConvoyError if a warm-up or a long prompt fails. A failed short is a record."""
        async with LoadClient(self.endpoint) as client:
            shorts_alone = [await self._one(client, self.prompts.short(), f"warm-{i}") for i in range(self.plan.warmup)]
            self.say(f"warm-up: {self.plan.warmup} shorts")
            if self.plan.warmup and self.plan.alone:
                cold = await self._one(client, self.prompts.long(), "warm-long")
                self.say(f"warm-up: a long prompt, {ttft_s(cold) or 0.0:.2f} s")
            alone, convoys = [], []
            for number in range(self.plan.repeat):
                if self.plan.alone:
                    alone.append(await self._one(client, self.prompts.long(), f"long-alone-{number}"))
                    self.say(f"long prompt alone: {ttft_s(alone[-1]) or 0.0:.2f} s")
                convoys.append(await self._convoy(client, number))
                long_s, count = ttft_s(convoys[-1].long) or 0.0, len(convoys[-1].shorts)
                self.say(f"long prompt among {count} shorts: {long_s:.2f} s")
        return ConvoyRun(
            convoys=tuple(convoys),
            longs_alone=tuple(alone),
            shorts_alone=tuple(shorts_alone),
        )

    async def _one(self, client: LoadClient, job: LoadRequest, name: str) -> RequestRecord:
        client.restart_clock()
        return _checked(await client.send(_named(job, name, 0.0)))

    async def _convoy(self, client: LoadClient, number: int) -> ConvoyResult:
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
                job = _named(self.prompts.short(), f"short-{number}-{len(shorts)}", due_s)
                if await _set_before(read, due_s - client.now()):
                    break
                shorts.append(asyncio.create_task(client.send(job)))
            cut_short = not read.is_set()
            return ConvoyResult(_checked(await long), tuple([await task for task in shorts]), cut_short)
        finally:
            for task in (long, *shorts):
                task.cancel()


async def _set_before(event: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, at most so long; whether it is set."""
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
