"""Request bodies for /docs. The parsers are what counts; this names the fields that they read, and their types."""

from __future__ import annotations

from typing import Any

_SAMPLING = (
    "stream:boolean stream_options:object max_tokens:integer min_tokens:integer temperature:number top_p:number "
    "top_k:integer min_p:number seed:integer stop:any stop_token_ids:array include_stop_str_in_output:boolean "
    "skip_special_tokens:boolean ignore_eos:boolean presence_penalty:number frequency_penalty:number "
    "repetition_penalty:number logit_bias:object priority:integer slo:object timeout_s:number "
    "return_token_ids:boolean user:string"
)
_CHAT = (
    "max_completion_tokens:integer logprobs:boolean top_logprobs:integer add_generation_prompt:boolean "
    "chat_template_kwargs:object"
)
_TOKENIZE = "add_special_tokens:boolean add_generation_prompt:boolean return_token_strs:boolean"
_BODIES = {
    "completions": (f"model:string prompt:any add_special_tokens:boolean logprobs:integer {_SAMPLING}", "model prompt"),
    "chat": (
        f"model:string messages:array {_CHAT} {_SAMPLING}",
        "model messages",
    ),
    "tokenize": (
        f"model:string prompt:string messages:array {_TOKENIZE}",
        "",
    ),
    "detokenize": ("model:string tokens:array", "tokens"),
}


def body_schema(name: str) -> dict[str, Any]:
    """The OpenAPI fragment for one endpoint's body."""
    fields, required = _BODIES[name]
    properties: dict[str, Any] = {}
    for item in fields.split():
        field, _, kind = item.partition(":")
        properties[field] = {} if kind == "any" else {"type": kind, **({"items": {}} if kind == "array" else {})}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required.split()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
