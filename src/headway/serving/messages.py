"""Chat messages, validated and converted to the plain form that chat templates take."""

from __future__ import annotations

from typing import Any

from headway.core.errors import RequestError
from headway.serving.json_object import kind

_ROLES = ("system", "developer", "user", "assistant")


def read_messages(value: object) -> list[dict[str, Any]]:
    """Return `messages` as {"role", "content": text}; `developer` becomes `system`. Only text is supported.

    Raises RequestError that names the message and its field.
    """
    if not isinstance(value, list) or not value:
        raise RequestError("'messages' is required: a non-empty array of messages", "messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"'{name}' must be an object, not {kind(value)}", name)
    role = value.get("role")
    if role in ("tool", "function"):
        raise RequestError(
            f"'{name}.role' {role!r} is not supported: the native engine has no tools; "
            "`vllm serve MODEL --scheduler-cls headway.vllm.Scheduler` has that",
            f"{name}.role",
        )
    if role not in _ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else kind(role)
        raise RequestError(f"'{name}.role' must be one of {', '.join(_ROLES)} (got {shown})", f"{name}.role")
    for unsupported in ("tool_calls", "function_call", "audio"):
        # Empty values are accepted: clients send `tool_calls: []` or null with plain text.
        if value.get(unsupported):
            raise RequestError(f"'{name}.{unsupported}' is not supported", f"{name}.{unsupported}")
    message = {"role": "system" if role == "developer" else role, "content": _content(value, role, f"{name}.content")}
    if isinstance(value.get("name"), str):
        message["name"] = value["name"]
    return message


def _content(message: dict[str, Any], role: str, name: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    # An assistant message may have no text, in the OpenAI API where it only calls tools.
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise RequestError(f"'{name}' must be text or an array of text parts, not {kind(content)}", name)
    return "".join(_part(part, f"{name}[{index}]") for index, part in enumerate(content))


def _part(part: Any, name: str) -> str:
    if not isinstance(part, dict):
        raise RequestError(f"'{name}' must be an object, not {kind(part)}", name)
    if part.get("type") != "text":
        shown = str(part.get("type"))[:40]
        raise RequestError(f"'{name}' has type {shown!r}; only 'text' is supported, no images, audio or files", name)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"'{name}.text' must be a string, not {kind(text)}", f"{name}.text")
    return text
