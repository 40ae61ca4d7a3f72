"""Chat templates: messages to text, in a sandbox, as the Hugging Face libraries render them.

A template comes with the model's files, so it is not fully trusted: it runs in Jinja's immutable sandbox, with access
to its arguments only. Clients cannot send templates.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.core.errors import ConfigError, RequestError

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For models that bring no template, such as base models: a line `role: text` for each message."""


_PROBE = "A0probe9Z"
"""A text that no template has of its own, nor changes."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; when serving it renders as if it were not there."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template with the model's special tokens (`bos_token`, ...) as variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        # The functions that Hugging Face's renderer adds.
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not a valid Jinja template: {error}") from None
        self._tools = "tool" in source
        # Forms of a message's content that the template shows: found by trying, as templates do not say.
        parts = self._tried([{"type": "text", "text": _PROBE}])
        # In quotes: the template shows the array, not its text.
        self._parts = _PROBE in parts and f"'{_PROBE}'" not in parts and f'"{_PROBE}"' not in parts
        self._strings = not self._parts or _PROBE in self._tried(_PROBE)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text. Raises RequestError with the template's own message when rendering fails."""
        given = {**self._special_tokens, "tools": None, "documents": None, **(variables or {})}
        # Last, so that a client's variables cannot replace the messages.
        shown = [self._formed(message, index) for index, message in enumerate(messages)]
        given |= {"messages": shown, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(given)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from None

    def turn_end(self, tokens: Collection[str]) -> str | None:
        """Return the token that follows an assistant's message at once; None where the template puts none."""
        text = self._tried(_PROBE if self._strings else [{"type": "text", "text": _PROBE}], role="assistant")
        rest = text.rpartition(_PROBE)[2].lstrip() if _PROBE in text else ""
        return max((token for token in tokens if rest.startswith(token)), key=len, default=None)

    def _formed(self, message: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        """Return a message with its content in a form that the template takes: a string, or parts.

        Raises RequestError for tools that the template would leave out.
        """
        field = "role" if message.get("role") == "tool" else "tool_calls"
        if not self._tools and (field == "role" or message.get(field)):
            name = f"messages[{index}].{field}"
            raise RequestError(f"'{name}' is of a tool, and the model's chat template knows none: leave it out", name)
        content = message.get("content")
        if isinstance(content, str) and not self._strings:
            return {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, list) and not self._parts:
            return {**message, "content": "".join(part["text"] for part in content)}
        return message

    def _tried(self, content: Any, role: str = "user") -> str:
        """Return a chat whose last message has that content; empty where the template refuses it."""
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        given = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self._template.render({**given, "messages": messages[: 1 + (role == "assistant")]})
        except Exception:  # whatever it is, a chat will say it
            return ""


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode plain JSON, in place of Jinja's own filter, which escapes for HTML: models were not trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
