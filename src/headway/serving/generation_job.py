"""What one HTTP request asks for, checked and ready to run. Made by `completions` and `chat`, run by `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from headway.core.errors import RequestError
from headway.core.request import Slo
from headway.core.sampling import SamplingParams
from headway.runtime.engine.protocol import EngineInfo
from headway.serving.body_fields import BodyFields
from headway.serving.errors import ApiError
from headway.serving.prompts import TokenPrompt
from headway.serving.request_bodies import GenerationBody
from headway.serving.settings import ServerSettings
from headway.serving.slo import read_slo


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text. `min_tokens`: stop strings count only from there on."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request: one engine request for each prompt. `timeout_s` counts from `received_s` (monotonic)."""

    model: str
    prompts: tuple[TokenPrompt, ...]
    params: SamplingParams
    text: TextOptions
    slo: Slo
    priority: int
    timeout_s: float | None
    received_s: float
    stream: bool
    include_usage: bool

    @property
    def prompt_tokens(self) -> int:
        """Over all prompts."""
        return sum(prompt.tokens for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Where a request came from: what its parser needs to know besides the body."""

    headers: Mapping[str, str]
    received_s: float
    info: EngineInfo
    settings: ServerSettings
    models: tuple[str, ...]


def build_job(
    body: GenerationBody,
    context: RequestContext,
    prompts: tuple[TokenPrompt, ...],
    params: SamplingParams,
    length_field: str | None,
) -> GenerationJob:
    """Make the job of a checked body. length_field: how the client spelt its output limit, for errors."""
    settings = context.settings
    limits = [limit for limit in (body.timeout_s, settings.request_timeout_s) if limit is not None]
    if body.stream_options is not None and not body.stream:
        raise RequestError("'stream_options' needs 'stream': true", "stream_options")
    return GenerationJob(
        model=body.model,
        prompts=prompts,
        params=fit_length(prompts, params, context.info, length_field),
        text=TextOptions(
            stops=body.stop,
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            min_tokens=params.min_tokens,
            return_token_ids=body.return_token_ids,
        ),
        slo=read_slo(context.headers, body.slo, settings),
        priority=body.priority,
        timeout_s=min(limits, default=None),
        received_s=context.received_s,
        stream=body.stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def read_model(fields: BodyFields, models: tuple[str, ...]) -> str:
    """Return the name that the client asked for.

    Raises RequestError when it is missing, ApiError 404 when it is none of `models`.
    """
    name = fields.text("model")
    if name is None:
        raise RequestError(f"'model' is required; this server has {models[0]!r}", "model")
    if name not in models:
        raise ApiError(404, f"the model {name[:200]!r} does not exist here; this server has {models[0]!r}", "model")
    return name


def fit_length(
    prompts: tuple[TokenPrompt, ...], params: SamplingParams, info: EngineInfo, length_field: str | None
) -> SamplingParams:
    """Refuse what can never fit into the model's context or the KV pool; settle an open `max_tokens`.

    `length_field` None: the client left its output limit open, and gets what is left.
    """
    longest = max(prompt.tokens for prompt in prompts)
    bounds = [(info.max_model_len, "the model's context (max_model_len)"), (info.kv_tokens_total, "the KV pool")]
    for bound, what in bounds:
        if longest >= bound:
            raise RequestError(
                f"the prompt has {longest} tokens; {what} holds {bound}, of which at least one must be left for output",
                "prompt",
            )
        if length_field is not None and longest + params.max_tokens > bound:
            raise RequestError(
                f"the prompt's {longest} tokens and {length_field} {params.max_tokens} add up to "
                f"{longest + params.max_tokens}; {what} holds {bound}",
                length_field,
            )
    left = min(bound for bound, _ in bounds) - longest
    if length_field is None:
        if params.min_tokens > left:
            raise RequestError(f"'min_tokens' ({params.min_tokens}) is above what is left ({left})", "min_tokens")
        return msgspec.structs.replace(params, max_tokens=left)
    return params
