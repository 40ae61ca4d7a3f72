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
    """Runner of a plan against one endpoint. say: called with lines of progress."""

    endpoint: TargetEndpoint
    plan: ConvoyPlan
    prompts: PromptSource
    say: Say = field(default=lambda line: None)

    async def run(self) -> ConvoyRun:
        """Run the experiment. A failed short becomes a record; raises ConvoyError for any other failed request."""
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
