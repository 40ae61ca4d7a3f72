"""The bodies of requests: one model each, from which the checks, the defaults and the OpenAPI page come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from headway.core.errors import RequestError
from headway.serving.json_object import kind, refuse, short
from headway.serving.messages import read_messages
from headway.serving.stops import read_stops

MAX_LOGPROBS = 20
MAX_SALT = 1024
"""Most characters of a cache salt."""
_INT32 = 2**31 - 1
_INT64 = 2**63
_LONGEST_MS = 1e12

Prompt = Annotated[Any, WithJsonSchema({})]
"""Text or token ids, or an array of either, which `serving.prompts` reads: no copy is made of a million ids."""
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(read_stops),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Messages = Annotated[
    list[dict[str, Any]],
    PlainValidator(read_messages),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]
Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields of unsupported features: by name, the values without effect, which are accepted, and the reason."""


class RequestBody(BaseModel):
    """Base of all bodies. `null` counts as absent, as in the OpenAI API; fields that no model has are ignored."""

    model_config = ConfigDict(
        strict=True, frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=()
    )
    unsupported: ClassVar[Unsupported] = {}


Body = TypeVar("Body", bound=RequestBody)


class SloBody(RequestBody):
    """Latency that a client asks for; headers win over it (`serving.slo`).

    An unknown key is refused, unlike elsewhere in a body: a misspelt promise would be kept by nothing."""

    model_config = ConfigDict(extra="forbid")

    ttft_ms: float | None = Field(None, gt=0, le=_LONGEST_MS, description="time to first token")
    tpot_ms: float | None = Field(None, gt=0, le=_LONGEST_MS, description="time per output token")
    refuse_late: bool | None = Field(
        None, description="answer 429 with Retry-After at once if the first token is predicted to be later than ttft_ms"
    )


class StreamOptions(RequestBody):
    """How to stream."""

    include_usage: bool | None = Field(None, description="end the stream with a chunk of token counts")
    continuous_usage_stats: bool | None = Field(None, description="token counts so far in every chunk")


_OTHER_ENGINE = "; `vllm serve MODEL --scheduler-cls headway.vllm.Scheduler` has that"
NO_STRUCTURE = "the native engine has no structured output" + _OTHER_ENGINE
NO_TOOLS = "the native engine has no tools" + _OTHER_ENGINE


class GenerationBody(RequestBody):
    """What both generating endpoints take."""

    unsupported: ClassVar[Unsupported] = {
        "best_of": ((1,), "n choices are n answers"),
        "use_beam_search": ((False,), "sampling only"),
        "prompt_embeds": ((), "send text or token ids"),
        "guided_json": ((), NO_STRUCTURE),
        "guided_regex": ((), NO_STRUCTURE),
        "guided_choice": ((), NO_STRUCTURE),
        "guided_grammar": ((), NO_STRUCTURE),
        "structured_outputs": ((), NO_STRUCTURE),
        "truncate_prompt_tokens": ((), "shorten the prompt before sending it"),
        "response_format": (({"type": "text"},), NO_STRUCTURE),
    }

    model: str = Field(description="a name that the model is served by (GET /v1/models)")
    stream: bool = Field(False, description="send the answer as server-sent events, as it comes")
    stream_options: StreamOptions | None = Field(None, description="object with include_usage; needs stream")
    max_tokens: int | None = Field(None, ge=1, le=_INT32, description="most output tokens")
    min_tokens: int = Field(0, ge=0, le=_INT32, description="least output tokens: no end or stop before")
    n: int = Field(1, ge=1, le=128, description="choices for each prompt; with a seed, choice i has seed + i")
    temperature: float = Field(1.0, ge=0, le=2, description="0: the most likely token")
    top_p: float = Field(1.0, gt=0, le=1, description="least probability mass that is sampled from")
    top_k: int = Field(0, ge=-1, le=_INT32, description="most likely tokens that are sampled from; 0 or -1: all")
    min_p: float = Field(0.0, ge=0, le=1, description="least probability, as a share of the most likely token's")
    seed: int | None = Field(None, ge=-_INT64, le=_INT64 - 1, description="of sampling; left out: one is drawn")
    stop: Stops = Field((), description="strings that end the answer: up to 16, of 1 to 1024 characters")
    stop_token_ids: list[int] = Field([], max_length=1024, description="tokens that end the answer")
    include_stop_str_in_output: bool = Field(False, description="leave the stop string in the answer")
    skip_special_tokens: bool = Field(True, description="leave special tokens out of the text")
    ignore_eos: bool = Field(False, description="go on after the model's end-of-sequence token")
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="subtracted from logits of tokens already output")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="the same, for each time that they were")
    repetition_penalty: float = Field(1.0, gt=0, le=100, description="divides logits of tokens of prompt and output")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(
        {}, max_length=1024, description="token id to a number in -100..100 that is added to its logit"
    )
    priority: int = Field(0, ge=-_INT64, le=_INT64 - 1, description="lower is earlier")
    slo: SloBody | None = Field(None, description="object with ttft_ms and tpot_ms, in milliseconds")
    request_class: str | None = Field(
        None, alias="class", description="kind of request, under which metrics count it; default: short or long"
    )
    timeout_s: float | None = Field(None, gt=0, le=1e9, description="seconds after which the request is ended")
    return_token_ids: bool = Field(False, description="token ids beside the text")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=MAX_SALT,
        description="prompts share cached prefixes only with prompts of the same salt and API key",
    )  # fmt: skip
    context_id: str | None = Field(
        None, description="a prepared document (/v1/contexts): its messages or prompt come before these"
    )
    cache_prompt: bool = Field(
        True, description="false: take nothing from the prefix cache and leave nothing in it (name as in llama.cpp)"
    )
    user: Annotated[Any, WithJsonSchema({"type": "string"})] = Field(None, description="not used")


class CompletionBody(GenerationBody):
    """/v1/completions."""

    unsupported: ClassVar[Unsupported] = {
        **GenerationBody.unsupported,
        "suffix": (("",), "text is only continued at its end"),
    }

    prompt: Prompt = Field(description="text or an array of token ids, or an array of several of these")
    max_tokens: int | None = Field(
        None, ge=0, le=_INT32, description="most output tokens; 0: the prompt alone, with echo or prompt_logprobs"
    )
    add_special_tokens: bool = Field(True, description="the tokenizer's special tokens before a text")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="log-probabilities of so many alternatives")
    echo: bool = Field(False, description="the prompt before the answer; with logprobs, the prompt's tokens too")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="log-probabilities of the prompt's tokens, with so many alternatives"
    )


class ChatBody(GenerationBody):
    """/v1/chat/completions."""

    unsupported: ClassVar[Unsupported] = {
        **GenerationBody.unsupported,
        "tools": (([],), NO_TOOLS),
        "functions": (([],), NO_TOOLS),
        "tool_choice": (("none", "auto"), NO_TOOLS),
        "function_call": (("none", "auto"), NO_TOOLS),
        "modalities": ((["text"],), "only text"),
        "audio": ((), "only text"),
        "chat_template": ((), "templates come with the model"),
        "continue_final_message": ((False,), "use /v1/completions to continue text"),
    }

    messages: Messages = Field(description="a non-empty array of messages: role and content (text)")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=_INT32, description="most output tokens; the newer spelling of max_tokens, and wins over it"
    )
    logprobs: bool = Field(False, description="log-probabilities of output tokens")
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS, description="alternatives for each; needs logprobs")
    add_generation_prompt: bool = Field(True, description="let the template open the assistant's message")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the chat template")


class TokenizeBody(RequestBody):
    """/tokenize."""

    model: str | None = Field(None, description="a name that the model is served by")
    prompt: str | None = Field(None, description="text; or else messages")
    messages: Messages | None = Field(None, description="messages of a chat, through the chat template")
    add_special_tokens: bool = Field(True, description="the tokenizer's special tokens before a text")
    add_generation_prompt: bool = Field(True, description="let the template open the assistant's message")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the chat template")
    return_token_strs: bool = Field(False, description="each token's text beside its id")


class DetokenizeBody(RequestBody):
    """/detokenize."""

    model: str | None = Field(None, description="a name that the model is served by")
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer"}})] = Field(
        description="an array of token ids"
    )


def read_body(body: type[Body], fields: Mapping[str, Any]) -> Body:
    """Check the fields that `body` has, and fill in defaults. Raises RequestError that names the field."""
    for name, (allowed, why) in body.unsupported.items():
        refuse(fields, name, allowed, why)
    try:
        return body.model_validate(fields)
    except ValidationError as error:
        raise _refusal(body, error) from None


def body_schema(body: type[RequestBody]) -> dict[str, Any]:
    """Return the OpenAPI fragment for an endpoint that takes `body`."""
    schema = body.model_json_schema()
    schema = _plain(schema, schema.pop("$defs", {}))
    # Required fields first, as the page shows them in this order.
    required = {name: schema["properties"].pop(name) for name in schema.get("required", ())}
    schema["properties"] = {**required, **schema["properties"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _plain(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a JSON schema without titles, references and `null`: a nullable field counts as optional."""
    if isinstance(schema, list):
        return [_plain(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **schema}
    # Pydantic describes `X | None` as anyOf of X and null.
    choices = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(choices) == 1:
        schema = {**schema, **_plain(choices[0], definitions), "description": schema.get("description", "")}
    left_out = {"$ref", "title"} | ({"anyOf"} if len(choices) == 1 else set())
    if schema.get("default", ...) is None:
        left_out.add("default")
    return {
        name: {each: _plain(inner, definitions) for each, inner in value.items()}
        if name == "properties"
        else _plain(value, definitions)
        for name, value in schema.items()
        if name not in left_out
    }


_EXPECTED = {
    "int_type": "an integer", "int_from_float": "an integer", "float_type": "a number", "bool_type": "true or false",
    "string_type": "a string", "list_type": "an array", "dict_type": "an object", "model_type": "an object",
}  # fmt: skip


_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def _refusal(body: type[RequestBody], error: ValidationError) -> RequestError:
    """Return the first error as a message with the field, the allowed values, and the given one."""
    item: Any = error.errors()[0]
    place, value, context = item["loc"], item["input"], item.get("ctx", {})
    field = next(each for name, each in body.model_fields.items() if place[0] in (name, each.alias))
    param = label = str(place[0])
    if len(place) > 1 and place[0] in ("slo", "stream_options"):
        param = label = f"{place[0]}.{place[1]}"
    elif len(place) > 1:
        label = f"{place[0]}[{place[1]!r:.40}]"
    if item["type"] == "extra_forbidden":
        return RequestError(f"'{label}' is not known; 'slo' holds {', '.join(SloBody.model_fields)}", param)
    if item["type"] == "missing":
        return RequestError(f"'{param}' is required: {field.description}", param)
    if item["type"] in _EXPECTED:
        return RequestError(f"'{label}' must be {_EXPECTED[item['type']]}, not {kind(value)}", param)
    if item["type"] in ("string_too_short", "string_too_long"):
        return RequestError(f"'{param}' must have 1 to {MAX_SALT} characters, not {len(value)}", param)
    if item["type"] == "too_long":
        count, most = context["actual_length"], context["max_length"]
        return RequestError(f"'{param}' holds {count} entries; at most {most} are allowed", param)
    # Pydantic names the limit that was broken; both are more helpful.
    limits = {name: getattr(each, name) for each in field.metadata for name in _LIMITS if hasattr(each, name)}
    allowed = " and ".join(f"{_LIMITS[name]} {limit}" for name, limit in (limits or context).items() if name in _LIMITS)
    return RequestError(f"'{label}' must be {allowed} (got {short(value)})", param)
