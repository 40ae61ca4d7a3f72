"""Chat templates: messages to text, in a sandbox, as the Hugging Face libraries render them.

A template comes with the model's files, so it is not fully trusted: it runs in Jinja's immutable sandbox, with access
to its arguments only. Clients cannot send templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(given)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from None


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
