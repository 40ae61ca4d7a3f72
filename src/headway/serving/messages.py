"""Chat messages, validated and converted to the plain form that chat templates take."""

from __future__ import annotations

import json
from typing import Any

from headway.core.errors import RequestError
from headway.serving.json_object import kind

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = ("name", "reasoning", "reasoning_content", "tool_call_id")
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
    message |= {field: value[field] for field in _TEXTS if isinstance(value.get(field), str)}
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
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                raise RequestError(f"'{place}.arguments' must be the text of a JSON object", name) from None
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found
