"""An engine for tests: says what it is told to say, remembers what it was asked, and records aborts."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from headway.core.errors import UnavailableError
from headway.core.request import TokenLogprobs
from headway.perf.hardware import model
from headway.perf.utilisation import UtilisationBase
from headway.runtime.engine.protocol import EngineInfo, EngineState, EngineStats, OutputDelta, SubmitRequest

INFO = EngineInfo(
    model="fake-model",
    architecture="fake",
    dtype="float32",
    device="cpu",
    max_model_len=4096,
    context_tokens=4096,
    vocab_size=512,
    kv_tokens_total=8192,
    kv_block_tokens=16,
    policy="fcfs",
    chunking="fixed",
    mode="default",
    t_target_s=0.1,
    max_num_seqs=64,
    max_queued_requests=128,
    parameters=1,
    weights_bytes=4,
    kv_bytes=4,
    eos_token_ids=(1,),
    utilisation=UtilisationBase(shape=model("llama-3-8b"), peak_flops=1e15, peak_bandwidth=1e12, origin="a data sheet"),
)

Script = Callable[[SubmitRequest, list[int]], Iterable[OutputDelta]]


@dataclass
class FakeEngine:
    """Implements `EngineClient`. `script` makes a request's deltas; the default says the prompt again, token by token.

    With `hold` set, each request waits for that event before its first delta; `gate` (a semaphore) is taken once before
    each later delta. `refuse` is raised at the first step of `generate`.
    """

    info_value: EngineInfo = INFO
    script: Script | None = None
    hold: asyncio.Event | None = None
    gate: asyncio.Semaphore | None = None
    refuse: Exception | None = None
    delay_s: float = 0.0
    state: EngineState = "starting"
    stats: EngineStats = field(default_factory=EngineStats)
    submits: list[SubmitRequest] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    closed: bool = False
    sent: int = 0

    @property
    def info(self) -> EngineInfo:
        if self.state == "starting":
            raise UnavailableError("the engine is still starting")
        return self.info_value

    async def start(self) -> EngineInfo:
        self.state = "ready"
        return self.info_value

    async def drain(self) -> None:
        self.state = "draining"
        while self.running:
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self.closed = True

    async def generate(self, submit: SubmitRequest, prompt: bytes | memoryview) -> AsyncGenerator[OutputDelta, None]:
        if self.refuse is not None:
            raise self.refuse
        ids = array("i", bytes(prompt)).tolist()
        assert len(ids) == submit.prompt_tokens
        self.submits.append(submit)
        self.prompts.append(ids)
        self.running.add(submit.id)
        over = False
        try:
            if self.hold is not None:
                await self.hold.wait()
            began = time.monotonic()
            for number, delta in enumerate((self.script or echo)(submit, ids)):
                if number and self.gate is not None:
                    await self.gate.acquire()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                over = delta.finish is not None
                self.sent += 1
                yield stamped(delta, began)
                if over:
                    return
        finally:
            self.running.discard(submit.id)
            (self.finished if over else self.aborted).append(submit.id)


def stamped(delta: OutputDelta, began: float) -> OutputDelta:
    """The delta with the times that an engine would put in."""
    return msgspec.structs.replace(delta, emitted_s=time.monotonic(), first_scheduled_s=began)


def say(tokens: Sequence[int], *, finish: str = "stop", per_delta: int = 1, stop_token: int | None = 1) -> Script:
    """A script that says `tokens` (at most max_tokens of them), then finishes."""

    def script(submit: SubmitRequest, ids: list[int]) -> Iterable[OutputDelta]:
        limited = list(tokens)[: submit.params.max_tokens]
        cut = len(limited) < len(tokens)
        for start in range(0, len(limited), per_delta):
            part = tuple(limited[start : start + per_delta])
            yield OutputDelta(id=submit.id, tokens=part, logprobs=logprobs_for(submit, part))
        reason = "length" if cut else finish
        yield OutputDelta(id=submit.id, finish=reason, stop_token=stop_token if reason == "stop" else None)

    return script


def echo(submit: SubmitRequest, ids: list[int]) -> Iterable[OutputDelta]:
    """The prompt again, over and over, until max_tokens."""
    for place in range(submit.params.max_tokens):
        token = ids[place % len(ids)]
        last = place == submit.params.max_tokens - 1
        part = (token,)
        yield OutputDelta(
            id=submit.id, tokens=part, logprobs=logprobs_for(submit, part), finish="length" if last else None
        )


def logprobs_for(submit: SubmitRequest, part: Sequence[int]) -> tuple[TokenLogprobs, ...] | None:
    """Made-up log-probabilities: the token itself first, then its neighbours."""
    count = submit.params.logprobs
    if count is None:
        return None
    return tuple(
        TokenLogprobs(-0.5, tuple(((token + step) % 256, -0.5 - step) for step in range(count))) for token in part
    )


def fail(reason: str, *, after: Sequence[int] = (), error: str | None = None, param: str | None = None) -> Script:
    """A script that says some tokens and then ends badly."""

    def script(submit: SubmitRequest, ids: list[int]) -> Iterable[OutputDelta]:
        for token in after:
            yield OutputDelta(id=submit.id, tokens=(token,))
        yield OutputDelta(id=submit.id, finish=reason, error=error, param=param)

    return script
