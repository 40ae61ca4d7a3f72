"""`LLM`: offline generation in this process, by the engine core, scheduler and executor that `headway serve` runs."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from headway.core.errors import ConfigError, HeadwayError, RequestError, needs_serve
from headway.core.request import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from headway.runtime.engine.protocol import FinishReason, OutputDelta

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass
class Completion:
    """The answer to one prompt."""

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    """Without special tokens; empty where the checkpoint has no tokenizer."""
    finish_reason: FinishReason | None = None
    """"stop" (an end token) or "length"."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per token where `SamplingParams.logprobs` asked for them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per prompt token but the first, where `SamplingParams.prompt_logprobs` asked for them."""
    ttft_s: float | None = None
    """Seconds from the call to the first token."""
    e2e_s: float | None = None
    """Seconds from the call to the last token."""


class LLM:
    """One engine without a server. Not thread-safe; `close` it, or use it as a context manager."""

    @needs_serve("LLM()")
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        max_model_len: int | None = None,
        threads: int | None = None,
        mode: Literal["default", "paper"] = "default",
        prefix_cache: bool = False,
        **scheduler: Any,
    ) -> None:
        """Load a checkpoint's folder (None: the embedded model) and measure it for about 0.3 s.

        `prefix_cache` keeps the KV of prompts until memory is needed: a prompt that begins as an earlier one did is
        computed from where they differ. `scheduler` holds fields of `SchedulerConfig`, such as `policy="fcfs"` or
        `t_target_s=0.1`. Raises ConfigError or CheckpointError when the model cannot be loaded or does not fit.
        """
        from headway.runtime.engine.config import settle

        settle()  # works only before torch is first imported
        from headway.runtime.assembly.engine import assemble
        from headway.runtime.embedded import model_path
        from headway.runtime.engine.config import EngineConfig
        from headway.serving.tokenizer import ModelTokenizer

        folder = model_path() if model is None else Path(model)
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder of a checkpoint")
        config = EngineConfig(
            model=str(folder),
            dtype=dtype,
            device="cpu",
            max_model_len=max_model_len,
            threads=threads,
            mode=mode,
            prefix_cache=prefix_cache,
            scheduler=scheduler,
            max_queued_requests=1 << 30,  # one call's prompts are in memory anyway: no limit of a server's queue
        )
        self._tokenizer = ModelTokenizer.load(folder)
        self._clock = _MonotonicClock()
        self._core = assemble(config, self._clock)
        self._ids = itertools.count()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._core.info.max_model_len

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, special tokens included."""
        return self._tokenizer.encode(text, add_special_tokens=True)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete one prompt or several, batched by the scheduler; return the completions in the prompts' order.

        `params`: one for all, or one per prompt; None: `SamplingParams()`. In float32 greedy tokens do not depend on
        what else is in the batch. Raises RequestError on a faulty prompt, before anything is computed.
        """
        listed: list[Prompt] = [prompts] if _is_one(prompts) else list(prompts)  # type: ignore[arg-type,list-item]
        each = [params or SamplingParams()] * len(listed) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(listed):
            raise RequestError(f"{len(listed)} prompts need as many params, not {len(each)}", "params")
        # Encoded before anything is submitted: a faulty text is refused with an empty engine.
        ids = [self.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in listed]
        return self._run(ids, each)

    def chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Completion:
        """Answer one conversation (`[{"role": "user", "content": …}]`) through the checkpoint's chat template."""
        text = self._tokenizer.render_chat(messages, add_generation_prompt=True, variables=None)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        params = params or SamplingParams()
        if not params.ignore_eos:
            ends = (*params.stop_token_ids, *self._tokenizer.turn_end)
            params = msgspec.structs.replace(params, stop_token_ids=ends)
        return self._run([ids], [params])[0]

    def close(self) -> None:
        """Free the model and its KV cache. Idempotent."""
        if not self._closed:
            self._closed = True
            self._core.executor.close()

    def _run(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        if self._closed:
            raise ConfigError("this LLM is closed")
        start_s = self._clock.now()
        answers: dict[str, Completion] = {}
        try:
            for ids, one in zip(prompts, params, strict=True):
                name = f"prompt-{next(self._ids)}"
                self._submit(name, ids, one, start_s)
                answers[name] = Completion(len(ids))
            # All prompts are submitted before the first step, so that they share batches from the start.
            pending = set(answers)
            while pending:
                for delta in self._core.step():
                    self._take(answers[delta.id], delta, start_s)
                    if delta.finish is not None:
                        pending.discard(delta.id)
        except BaseException:  # Ctrl-C and refused prompts too: the next call must find an empty engine
            self._abort(answers)
            raise
        for answer in answers.values():
            # Once at the end: nothing is streamed, so no incremental decoder is needed.
            answer.text = self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        return list(answers.values())

    def _submit(self, name: str, ids: list[int], params: SamplingParams, start_s: float) -> None:
        import msgspec
        import numpy as np

        from headway.runtime.engine.protocol import SubmitRequest

        if params.seed is None:  # the sampler's streams are keyed by a seed
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        submit = SubmitRequest(id=name, prompt_tokens=len(ids), params=params, received_s=start_s)
        try:
            # int32: the engine's format; larger ids overflow here and are refused.
            frame = np.asarray(ids, dtype=np.int32)
        except (OverflowError, TypeError, ValueError):
            raise RequestError("a prompt is text or a sequence of token ids", "prompt") from None
        refusal = self._core.submit(submit, memoryview(frame.tobytes()))
        if refusal is not None:
            raise RequestError(refusal.error or "the prompt was refused", refusal.param)

    def _take(self, answer: Completion, delta: OutputDelta, start_s: float) -> None:
        """Add a delta to its completion. start_s: beginning of the call. Raises HeadwayError if it failed."""
        if delta.finish == "error":
            raise HeadwayError(delta.error or "the request failed")
        if answer.ttft_s is None:
            answer.ttft_s = delta.emitted_s - start_s
        answer.token_ids.extend(delta.tokens)
        answer.logprobs.extend(delta.logprobs or ())
        answer.prompt_logprobs.extend(delta.prompt_logprobs or ())
        answer.e2e_s, answer.finish_reason = delta.emitted_s - start_s, delta.finish

    def _abort(self, names: Mapping[str, Completion]) -> None:
        """Abort all requests of a call, finished ones included, and wait until the engine is empty."""
        for name in names:
            self._core.abort(name)
        while not self._core.idle:  # aborted requests leave with the batches in flight
            self._core.step()


class _MonotonicClock:
    """Clock of CLOCK_MONOTONIC, in seconds."""

    def now(self) -> float:
        """Return the present in seconds."""
        return time.monotonic()


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether `prompts` is one prompt: text, or a sequence that begins with a token id."""
    # An empty sequence is a list of no prompts.
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
