"""The bodies of requests: bounded reading, one model for each body, and the checks of fields, messages, sampling
settings and latency targets.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from headway.core.errors import RequestError
from headway.core.request import SamplingParams, Slo
from headway.serving.settings import ServerSettings
from headway.serving.text import read_stops

# Decoding a request body: one JSON object, bounded in structure, with errors that name the field.
#
# `null` counts as absent, as in the OpenAI API.

STRUCTURE_BYTES = 1 << 20
"""Most bytes of a body that are neither long text nor token ids: objects of a megabyte of JSON take 100 MB at most."""

_TEXTS = frozenset(("prompt", "messages", "input"))
"""Fields that may hold long texts."""
_IDS = frozenset(("prompt", "tokens"))
"""Fields that may hold many token ids."""
_SHORT_TEXT = 64
"""Bytes that a long text counts for: what its object takes besides the text itself."""
# Matches to the end of a text that is not closed, so that no byte is looked at twice.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_FIELD_NAME = re.compile(rb'"([A-Za-z_][A-Za-z0-9_]{0,63})"\s*:')
_LOOK_BACK = 256 << 10
"""Bytes before an error in which the field's name is sought."""
_POSITION = re.compile(r"\(byte (\d+)\)")
_decoder = msgspec.json.Decoder()


def decode(body: bytes | bytearray) -> dict[str, Any]:
    """Decode a body, without fields that are null. Raises RequestError when it is not one JSON object."""
    try:
        fields = _decoder.decode(body)
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(bytes(body), str(error)) from None
    if not isinstance(fields, dict):
        raise RequestError("the request body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def check_structure(body: bytes, most_ids: int) -> None:
    """Refuse a body whose decoded form is many times its size, before it is decoded. Raises RequestError.

    most_ids: most token ids of all prompts together.
    """
    size = ids = depth = begin = 0
    field = ""
    for found in _STRING.finditer(body):
        between = body[begin : found.start()]
        begin, text = found.end(), found.end() - found.start()
        depth += _opened(between)
        field_size, field_ids = _weight(between, field)
        size, ids = size + field_size, ids + field_ids
        size += min(text, _SHORT_TEXT) if field in _TEXTS else text
        # A name of the body's own object; its values come until the next one.
        if depth == 1 and text <= _SHORT_TEXT and body[begin : begin + 64].lstrip()[:1] == b":":
            field = body[found.start() + 1 : begin - 1].decode("utf-8", "replace")
        _check(size, ids, most_ids, field)
    field_size, field_ids = _weight(body[begin:], field)
    _check(size + field_size, ids + field_ids, most_ids, field)


def _opened(between: bytes) -> int:
    return between.count(b"{") + between.count(b"[") - between.count(b"}") - between.count(b"]")


def _weight(between: bytes, field: str) -> tuple[int, int]:
    """Return the bytes that a part between two texts counts for, and the token ids in it."""
    if field not in _IDS:
        return len(between), 0
    # Lists and objects take 64 bytes each, whatever is in them.
    return 32 * (between.count(b"[") + between.count(b"{")), between.count(b",")


def _check(size: int, ids: int, most_ids: int, field: str) -> None:
    if ids > most_ids:
        raise RequestError(f"'{field}' holds more than {most_ids} token ids, which is more than can be served", field)
    if size > STRUCTURE_BYTES:
        # At the field that passed the limit.
        name = field if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", field) else None
        where = f" at '{name}'" if name else ""
        raise RequestError(
            f"the request body has more than {STRUCTURE_BYTES >> 10} KiB besides long texts and token ids{where}; "
            "send fewer fields, keys or messages",
            name,
        )


def text_field(fields: Mapping[str, Any], name: str) -> str | None:
    """Return a field that is text; None when it is absent. Raises RequestError for another type."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise RequestError(f"'{name}' must be a string, not {kind(value)}", name)


def refuse(fields: Mapping[str, Any], name: str, allowed: Collection[object], why: str) -> None:
    """Raise RequestError for a field of an unsupported feature, unless its value is in `allowed` (no effect)."""
    value = without_nulls(fields.get(name))
    # The type is compared too: in Python True == 1 and 1 == 1.0.
    if value is not None and not any(value == item and type(value) is type(item) for item in allowed):
        raise RequestError(f"'{name}' is not supported: {why}", name)


def without_nulls(value: Any) -> Any:
    """Return an object without its fields that are null; other values as they are."""
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else value


def check_integer(value: object, name: str, low: int, high: int) -> int:
    """Return `value` as an integer in low..high. Raises RequestError that names the field `name`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"'{name}' must be an integer, not {kind(value)}", name)
    if not low <= value <= high:
        raise RequestError(f"'{name}' must lie in {low}..{high} (got {short(value)})", name)
    return value


def kind(value: object) -> str:
    """Return the JSON type of a value, with its article, for error messages."""
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null")


def short(value: object) -> str:
    """Return a value for error messages, cut to 40 characters."""
    # str() of a huge integer is quadratic, and raises above 4,300 digits.
    text = str(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge integer"
    return text if len(text) <= 40 else text[:37] + "..."


def _malformed(body: bytes, why: str) -> RequestError:
    """Describe invalid JSON and the field near it, without quoting the prompt. why: the decoder's words."""
    place = _POSITION.search(why)
    name = _broken_field(body) or _field_before(body, int(place[1]) if place else len(body))
    if "truncated" in why:
        why = "it ends too early, or a text holds half of a surrogate pair"
    where = f" in or after '{name}'" if name else ""
    return RequestError(f"the request body is not valid JSON{where}: {why}", name)


def _broken_field(body: bytes) -> str | None:
    """Return the first field whose value cannot be read; None where the body is no object of values."""
    name = None
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():  # noqa: B007
            msgspec.json.decode(value)
        return None
    return name


def _field_before(data: bytes, position: int) -> str | None:
    """Return the last `"name":` up to `position`; None when it is far before.

    Quotes inside strings are escaped, so text cannot match.
    """
    names = _FIELD_NAME.findall(data, max(0, position - _LOOK_BACK), position + 1)
    return names[-1].decode() if names else None


_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_TEXTS = ("name", "reasoning", "reasoning_content", "tool_call_id")
"""Further fields of text that templates show."""


def read_messages(value: object) -> list[dict[str, Any]]:
    """Return `messages` as {"role", "content": text or text parts, ...}; `developer` becomes `system`.

    Kept are a model's reasoning and its calls of tools, and the tools' answers, in earlier messages: templates show
    them. Raises RequestError that names the message and its field.
    """
    if not isinstance(value, list) or not value:
        raise RequestError("'messages' is required: a non-empty array of messages", "messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"'{name}' must be an object, not {kind(value)}", name)
    role = value.get("role")
    if role not in _ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else kind(role)
        raise RequestError(f"'{name}.role' must be one of {', '.join(_ROLES)} (got {shown})", f"{name}.role")
    for unsupported in ("function_call", "audio"):
        # Empty values are accepted: clients send them with plain text.
        if value.get(unsupported):
            raise RequestError(f"'{name}.{unsupported}' is not supported", f"{name}.{unsupported}")
    message = {"role": "system" if role == "developer" else role, "content": _content(value, role, f"{name}.content")}
    message |= {field: value[field] for field in _MESSAGE_TEXTS if isinstance(value.get(field), str)}
    if value.get("tool_calls"):
        message["tool_calls"] = _tool_calls(value["tool_calls"], f"{name}.tool_calls")
    return message


def _content(message: dict[str, Any], role: str, name: str) -> str | list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return content
    # An assistant message may have no text, where it only calls tools.
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise RequestError(f"'{name}' must be text or an array of text parts, not {kind(content)}", name)
    return [_part(part, f"{name}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, name: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise RequestError(f"'{name}' must be an object, not {kind(part)}", name)
    if part.get("type") != "text":
        shown = str(part.get("type"))[:40]
        raise RequestError(f"'{name}' has type {shown!r}; only 'text' is supported, no images, audio or files", name)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"'{name}.text' must be a string, not {kind(text)}", f"{name}.text")
    return {"type": "text", "text": text}


def _tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """Return an assistant's calls of functions, with their arguments as the object that templates take."""
    if not isinstance(calls, list):
        raise RequestError(f"'{name}' must be an array, not {kind(calls)}", name)
    found = []
    for index, call in enumerate(calls):
        place = f"{name}[{index}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"'{place}' must be an object with a name and arguments", name)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise RequestError(f"'{place}.arguments' must be the text of a JSON object", name) from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


MAX_LOGPROBS = 20
MAX_SALT = 1024
"""Most characters of a cache salt."""
_INT32 = 2**31 - 1
_INT64 = 2**63
_LONGEST_MS = 1e12

Prompt = Annotated[Any, WithJsonSchema({})]
"""Text or token ids, or an array of either, which `serving.jobs` reads: no copy is made of a million ids."""
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
    """Latency that a client asks for; headers win over it (`serving.request_bodies`).

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


_UNLIMITED = 2**31 - 1


SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings that a checkpoint's generation_config.json may give."""


def sampling_params(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    vocab_size: int,
    prompt_logprobs: int | None = None,
    defaults: Mapping[str, float] = MappingProxyType({}),
) -> SamplingParams:
    """Return the parameters of a request. max_tokens None: as many as the model allows, settled by `fit_length`.

    defaults: of the checkpoint's generation_config.json, for settings that the body leaves out, as vLLM takes them.
    Without a seed one is drawn, so that recomputation of a request continues its own random stream. Raises RequestError
    for token ids outside the vocabulary.
    """
    limit = _UNLIMITED if max_tokens is None else max_tokens
    if body.min_tokens > limit:
        message = f"'min_tokens' ({body.min_tokens}) must not be above the output limit ({limit})"
        raise RequestError(message, "min_tokens")
    stops = body.stop_token_ids
    given = {
        name: defaults.get(name, value) if name not in body.model_fields_set else value
        for name, value in ((name, getattr(body, name)) for name in SAMPLING_DEFAULTS)
    }
    return SamplingParams(
        max_tokens=limit,
        min_tokens=body.min_tokens,
        temperature=given["temperature"],
        top_p=given["top_p"],
        # -1 means all tokens for vLLM's clients, 0 for the sampler.
        top_k=max(0, int(given["top_k"])),
        min_p=given["min_p"],
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        seed_drawn=body.seed is None,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=given["repetition_penalty"],
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=body.ignore_eos,
        stop_token_ids=tuple(check_integer(token, "stop_token_ids", 0, vocab_size - 1) for token in stops),
    )


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    for key in biases:
        # Keys of a JSON object are text; under 10 digits, so that int() of a long one is never computed.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            message = f"'logit_bias' has a key that is not a token id in 0..{vocab_size - 1}"
            raise RequestError(message, "logit_bias")
    return {int(key): bias for key, bias in biases.items()}


# Latency targets of a request, from headers or body, clamped to the operator's limits.
#
# Headers win over the body; of the headers the canonical name wins over its alias. A tight target of one client delays
# the requests of others, so the operator limits how tight it may be.

TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
REFUSE_HEADER = "x-slo-refuse-late"


def read_slo(headers: Mapping[str, str], body: SloBody | None, settings: ServerSettings) -> Slo:
    """Return the targets in seconds, within the settings' limits; None where the client asks for nothing.

    Raises RequestError that names the header.
    """
    ttft_ms, tpot_ms = _from_headers(headers, TTFT_HEADERS), _from_headers(headers, TPOT_HEADERS)
    refuse_late = _flag(headers)
    if body is not None:
        refuse_late = body.refuse_late if refuse_late is None else refuse_late
        ttft_ms = body.ttft_ms if ttft_ms is None else ttft_ms
        tpot_ms = body.tpot_ms if tpot_ms is None else tpot_ms
    if refuse_late and ttft_ms is None:
        raise RequestError("'slo.refuse_late' needs a time to first token: add 'ttft_ms'", "slo")
    return Slo(
        ttft_s=_clamp(ttft_ms, settings.slo_min_ttft_s, settings.slo_max_ttft_s),
        tbt_s=_clamp(tpot_ms, settings.slo_min_tbt_s, settings.slo_max_tbt_s),
        refuse_late=bool(refuse_late),
    )


def _flag(headers: Mapping[str, str]) -> bool | None:
    """Return whether a late request is to be refused; None: the header is not there."""
    value = headers.get(REFUSE_HEADER)
    if value is None:
        return None
    if value.lower() not in ("true", "false", "1", "0"):
        raise RequestError(f"header '{REFUSE_HEADER}' must be true or false", REFUSE_HEADER)
    return value.lower() in ("true", "1")


def _from_headers(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = headers.get(name)
        # The next name is an alias of the first.
        if value is None:
            continue
        try:
            # nan fails the range check below, and so does a header that is no number.
            number = float(value[:40])
        except ValueError:
            number = math.nan
        if not 0 < number <= _LONGEST_MS:
            raise RequestError(f"header '{name}' must be a number of milliseconds above 0", name)
        return number
    return None


def _clamp(ms: float | None, low_s: float, high_s: float) -> float | None:
    return None if ms is None else min(max(ms / 1000.0, low_s), high_s)
