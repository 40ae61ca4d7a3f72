"""One HTTP request for generation, validated and ready to run. Built by `completions` and `chat`, run by `generate`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.core.errors import HeadwayError, RequestError
from headway.core.request import Slo
from headway.core.sampling import SamplingParams
from headway.runtime.engine.protocol import EngineInfo
from headway.serving.context_records import ContextRecord
from headway.serving.errors import ApiError
from headway.serving.json_object import text_field
from headway.serving.prompts import TokenPrompt
from headway.serving.request_bodies import CompletionBody, GenerationBody
from headway.serving.settings import ServerSettings
from headway.serving.slo import read_slo

_CLASS = re.compile(r"[A-Za-z0-9_.-]{1,32}")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How output tokens become text."""

    stops: tuple[str, ...] = ()
    """Stop strings, without duplicates."""
    include_stop: bool = False
    """Whether the stop string that matched is part of the text."""
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Output tokens before which stop strings are not matched."""
    return_token_ids: bool = False
    echo: bool = False
    """Whether the answer begins with the prompt."""
    prompt_only: bool = False
    """Whether the answer has no tokens of the model's: the one that the engine computes is left out."""
    continues: bool = False
    """Whether the answer continues the prompt's text, as a completion does and a chat's does not."""
    prompt_logprobs: bool = False
    """Whether choices have the prompt's log-probabilities in a field of their own."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request: one engine request for each prompt."""

    model: str
    prompts: tuple[TokenPrompt, ...]
    params: SamplingParams
    text: TextOptions
    slo: Slo
    priority: int
    timeout_s: float | None
    """Seconds after `received_s` at which the engine ends the request; None: no limit."""
    received_s: float
    """When the whole body had arrived, `time.monotonic()` seconds."""
    stream: bool
    include_usage: bool
    """Whether a stream ends with a chunk of token counts."""
    continuous_usage: bool = False
    """Whether every chunk of a stream has the token counts so far."""
    choices: int = 1
    """Choices of each prompt: `prompts` has each so many times, one after another."""
    cache_salt: str = ""
    """Prompts share cached prefixes with prompts of the same salt; the client's key is part of it."""
    cache_prompt: bool = True
    """Whether prompts may use the prefix cache."""
    request_class: str | None = None
    """The client's name for the kind of request, for metrics; None: by the prompt's length."""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens over all prompts, each counted once."""
        return sum(prompt.tokens for prompt in self.prompts) // self.choices


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Input of a request's parser besides the body."""

    headers: Mapping[str, str]
    received_s: float
    """When the whole body had arrived, `time.monotonic()` seconds."""
    info: EngineInfo
    settings: ServerSettings
    models: tuple[str, ...]
    """Names that the model is served by."""
    owner: str = ""
    """A hash of the client's API key; empty without one."""
    prepared: ContextRecord | None = None
    """The prepared document that the body names."""


class ContextNeededError(HeadwayError):
    """A body names the prepared document `name`, without which it cannot be read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def prepared_context(body: GenerationBody, context: RequestContext) -> ContextRecord | None:
    """Return the prepared document that a request names; None where it names none. Raises ContextNeededError."""
    if body.context_id is None:
        return None
    if context.prepared is None:
        raise ContextNeededError(body.context_id)
    context.prepared.check_salt(body.cache_salt)
    return context.prepared


def build_job(
    body: GenerationBody,
    context: RequestContext,
    prompts: tuple[TokenPrompt, ...],
    params: SamplingParams,
    length_field: str | None,
) -> GenerationJob:
    """Build the job of a validated body. length_field: the body's field that limits the output, named in errors."""
    settings = context.settings
    # The smaller of the client's and the operator's limit: a client may shorten, never extend.
    limits = [limit for limit in (body.timeout_s, settings.request_timeout_s) if limit is not None]
    if len(prompts) * body.n > settings.max_prompts:
        asked = f"'n' times the number of prompts is {len(prompts) * body.n}"
        raise RequestError(f"{asked}; at most {settings.max_prompts} are allowed", "n")
    if body.stream_options is not None and not body.stream:
        raise RequestError("'stream_options' needs 'stream': true", "stream_options")
    return GenerationJob(
        model=body.model,
        prompts=tuple(prompt for prompt in prompts for _ in range(body.n)),
        params=fit_length(prompts, params, context.info, length_field),
        text=TextOptions(
            stops=body.stop,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            min_tokens=params.min_tokens,
            return_token_ids=body.return_token_ids,
            echo=getattr(body, "echo", False),
            continues=isinstance(body, CompletionBody),
            prompt_only=body.max_tokens == 0,
            prompt_logprobs=getattr(body, "prompt_logprobs", None) is not None,
        ),
        slo=read_slo(context.headers, body.slo, settings),
        priority=body.priority,
        timeout_s=min(limits, default=None),
        received_s=context.received_s,
        stream=body.stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        continuous_usage=bool(body.stream_options and body.stream_options.continuous_usage_stats),
        choices=body.n,
        cache_salt=_salt(body, context),
        cache_prompt=body.cache_prompt,
        request_class=read_class(body.request_class),
    )


def _salt(body: GenerationBody, context: RequestContext) -> str:
    record = prepared_context(body, context)
    return salt_of(context.owner, body.cache_salt) if record is None else salt_of(record.owner, record.cache_salt)


def salt_of(owner: str, given: str | None) -> str:
    """Return the salt of a client's prompts in the prefix cache."""
    # A salt that a client makes up cannot begin with another's key: hashes have no "/".
    return f"{owner}/{given or ''}"


def read_class(given: str | None) -> str | None:
    """Return the request's class. Raises RequestError for a name that is no label."""
    if given is not None and not _CLASS.fullmatch(given):
        raise RequestError("'class' must be 1 to 32 letters, digits or any of _.-", "class")
    return given


def read_model(fields: Mapping[str, Any], models: tuple[str, ...]) -> str:
    """Return the model name in the request.

    Raises RequestError when it is missing, ApiError 404 when it is none of `models`.
    """
    name = text_field(fields, "model")
    if name is None:
        raise RequestError(f"'model' is required; this server has {models[0]!r}", "model")
    if name not in models:
        raise ApiError(404, f"the model {name[:200]!r} does not exist here; this server has {models[0]!r}", "model")
    return name


def fit_length(
    prompts: tuple[TokenPrompt, ...], params: SamplingParams, info: EngineInfo, length_field: str | None
) -> SamplingParams:
    """Set an open `max_tokens`, and raise RequestError for lengths that exceed the model's context or the KV pool.

    `length_field` None: the client set no output limit, so `max_tokens` becomes what the longest prompt leaves.
    """
    longest = max(prompt.tokens for prompt in prompts)
    bounds = [(info.max_model_len, "the model's context (max_model_len)"), (info.kv_tokens_total, "the KV pool")]
    for bound, what in bounds:
        # At least one output token must fit, hence >= and not >.
        if longest >= bound:
            raise RequestError(
                f"This model's maximum context length is {bound} tokens. However, you requested {longest + 1} tokens "
                f"({longest} in the prompt, and at least one must be left for output; {what} is the limit)",
                "prompt",
            )
        if length_field is not None and longest + params.max_tokens > bound:
            raise RequestError(
                f"This model's maximum context length is {bound} tokens. However, you requested "
                f"{longest + params.max_tokens} tokens ({longest} in the prompt, {params.max_tokens} in "
                f"{length_field}; {what} is the limit)",
                length_field,
            )
    left = min(bound for bound, _ in bounds) - longest
    if length_field is None:
        if params.min_tokens > left:
            raise RequestError(f"'min_tokens' ({params.min_tokens}) is above what is left ({left})", "min_tokens")
        return msgspec.structs.replace(params, max_tokens=left)
    return params
