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
from headway.serving.sampling_fields import read_stops
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
    fields: BodyFields,
    asker: RequestContext,
    model: str,
    prompts: tuple[TokenPrompt, ...],
    params: SamplingParams,
    length_field: str | None,
) -> GenerationJob:
    """The part that both endpoints share. `length_field` is how the client spelt its output limit, for errors."""
    stream = fields.flag("stream")
    settings = asker.settings
    timeout_s = fields.number("timeout_s", 0, 1e9, above_low=True)
    limits = [limit for limit in (timeout_s, settings.request_timeout_s) if limit is not None]
    return GenerationJob(
        model=model,
        prompts=prompts,
        params=fit_length(prompts, params, asker.info, length_field),
        text=TextOptions(
            stops=read_stops(fields),
            include_stop=fields.flag("include_stop_str_in_output"),
            skip_special_tokens=fields.flag("skip_special_tokens", True),
            min_tokens=params.min_tokens,
            return_token_ids=fields.flag("return_token_ids"),
        ),
        slo=read_slo(asker.headers, fields, settings),
        priority=fields.integer("priority", -(2**63), 2**63 - 1) or 0,
        timeout_s=min(limits, default=None),
        received_s=asker.received_s,
        stream=stream,
        include_usage=_include_usage(fields, stream),
    )


def read_model(fields: BodyFields, models: tuple[str, ...]) -> str:
    """The name the client asked for: 400 when missing, 404 when nobody here has it."""
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


def refuse_unsupported(fields: BodyFields) -> None:
    """Features that neither endpoint has, refused by name; asking for nothing is allowed."""
    fields.refuse("n", (1,), "one choice for each prompt; send the request several times with different seeds")
    fields.refuse("best_of", (1,), "one choice for each prompt")
    fields.refuse("use_beam_search", (False,), "sampling only")
    fields.refuse("prompt_embeds", (), "send text or token ids")
    fields.refuse("guided_json", (), "structured output does not exist here")
    fields.refuse("guided_regex", (), "structured output does not exist here")
    fields.refuse("guided_choice", (), "structured output does not exist here")
    fields.refuse("guided_grammar", (), "structured output does not exist here")
    fields.refuse("structured_outputs", (), "structured output does not exist here")
    fields.refuse("truncate_prompt_tokens", (), "shorten the prompt before sending it")
    fields.refuse("response_format", ({"type": "text"},), "only plain text")


def _include_usage(fields: BodyFields, stream: bool) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise RequestError("'stream_options' must be an object", "stream_options")
    if not stream:
        raise RequestError("'stream_options' needs 'stream': true", "stream_options")
    include = options.get("include_usage")
    if include is not None and not isinstance(include, bool):
        raise RequestError("'stream_options.include_usage' must be true or false", "stream_options.include_usage")
    return bool(include)
