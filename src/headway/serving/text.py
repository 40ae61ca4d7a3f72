"""Text from tokens: incremental detokenization, and stop strings; and text from messages: chat templates.

Of stop strings, one Knuth-Morris-Pratt automaton per string is stepped once per character, so the result does not
depend on how the text is cut. The match that completes first wins; of several that complete together, the longest.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import tokenizers


MAX_STOPS = 16
MAX_STOP_CHARS = 1024


def read_stops(value: object) -> tuple[str, ...]:
    """Validate `stop`: one string, or up to 16 non-empty ones; return them without duplicates. Raises RequestError."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise RequestError("'stop' must be a string or an array of strings", "stop")
    if len(items) > MAX_STOPS:
        raise RequestError(f"'stop' holds {len(items)} strings; at most {MAX_STOPS} are allowed", "stop")
    for item in items:
        if not 1 <= len(item) <= MAX_STOP_CHARS:
            raise RequestError(f"a 'stop' string must have 1..{MAX_STOP_CHARS} characters (got {len(item)})", "stop")
    return tuple(dict.fromkeys(items))


class StopMatcher:
    """Matcher over the text of one answer.

    Amortised work per character is O(number of stop strings); held-back text is shorter than the longest of them.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """include: whether the matched stop string is shown at the end of the text."""
        # Longest first: `_step` returns the first automaton that completes at a character.
        self._stops = sorted(stops, key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        # Per stop string, how many of its characters the text's end matches.
        self._states = [0] * len(self._stops)
        self._held = ""
        self._include = include
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that is safe to show now; empty after a match (`matched` is set)."""
        if not self._stops or self.matched is not None:
            return text if self.matched is None else ""
        # The held text has been stepped already: only the new characters are.
        whole = self._held + text
        begin = len(self._held)
        for place, char in enumerate(text, begin):
            stop = self._step(char)
            if stop is not None:
                end = place + 1
                self._held, self.matched = "", stop
                return whole[: end if self._include else end - len(stop)]
        # The longest partial match may still become a stop string; the text before it cannot.
        keep = len(whole) - max(self._states)
        self._held = whole[keep:]
        return whole[:keep]

    def flush(self) -> str:
        """Return the held-back text at the end of the answer: an incomplete stop string is ordinary text."""
        rest, self._held = self._held, ""
        return rest

    def _step(self, char: str) -> str | None:
        """Advance all automata by one character; return the stop string that it completes, if any."""
        for which, stop in enumerate(self._stops):
            state, table = self._states[which], self._tables[which]
            # Fall back along borders until the character extends one.
            while state and stop[state] != char:
                state = table[state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                return stop
            self._states[which] = state
        return None


def _failure_table(stop: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper border (Knuth-Morris-Pratt)."""
    table = [0] * len(stop)
    border = 0
    for place in range(1, len(stop)):
        while border and stop[border] != stop[place]:
            border = table[border - 1]
        if stop[border] == stop[place]:
            border += 1
        table[place] = border
    return table


_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer(Protocol):
    """Incremental decoder of one answer. The joined pieces equal the text of all tokens."""

    def feed(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """Return the rest at the end of the answer: an incomplete character shows as U+FFFD."""


class SilentDetokenizer:
    """Decoder for models without a tokenizer: the text is empty."""

    def feed(self, token: int) -> str:
        """Return the empty string."""
        return ""

    def flush(self) -> str:
        """Return the empty string."""
        return ""


class ByteLevelDetokenizer:
    """Decoder for byte-level BPE: every token is a fixed byte string, so a streaming UTF-8 decoder is exact and O(1).

    table: bytes of each token id; unknown ids and those in `skip` show nothing.
    """

    def __init__(self, table: Mapping[int, bytes], skip: AbstractSet[int]) -> None:
        self._table = table
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """Return the characters that this token completes."""
        return "" if token in self._skip else self._decoder.decode(self._table.get(token, b""))

    def flush(self) -> str:
        """Return U+FFFD for an incomplete last character, else the empty string."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decoder for all other tokenizers: decode the newest few tokens with and without the new one; show the difference.

    The tokens shown last are the context, on which a word's leading space depends. Text that ends in U+FFFD may be an
    incomplete character and is held back for up to `PATIENCE` tokens.
    """

    PATIENCE = 4
    """A UTF-8 character has at most 4 bytes: after as many tokens U+FFFD is part of the text."""

    def __init__(self, backend: tokenizers.Tokenizer, skip: AbstractSet[int], before: Sequence[int] = ()) -> None:
        """before: tokens whose text this one continues, the last of them."""
        self._backend = backend
        self._skip = skip
        # Tokens already shown that precede `_pending`, whose text is not shown yet.
        self._context = [token for token in before if token not in skip][-2 * self.PATIENCE :]
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        """Return the text that became final with this token."""
        if token in self._skip or self._backend.id_to_token(token) is None:
            return ""
        self._pending.append(token)
        text = self._difference()
        if text.endswith(_REPLACEMENT) and len(self._pending) < self.PATIENCE:
            return ""
        return self._accept(text)

    def flush(self) -> str:
        """Return the text of the pending tokens."""
        return self._accept(self._difference()) if self._pending else ""

    def _difference(self) -> str:
        """Return the text that the pending tokens add to the context."""
        before = self._decode(self._context)
        whole = self._decode(self._context + self._pending)
        # A tokenizer may rewrite earlier text when more follows: then the pending tokens are decoded alone.
        return whole[len(before) :] if whole.startswith(before) else self._decode(self._pending)

    def _accept(self, text: str) -> str:
        # Tokens without text keep the old context; without it the next one would lose its leading space.
        self._context = self._pending if text else (self._context + self._pending)[-self.PATIENCE :]
        self._pending = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False) if ids else ""


def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's alphabet (GPT-2): printable Latin-1 bytes as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shown = {chr(byte): byte for byte in printable}
    return shown | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a vocabulary entry. Added tokens are spelt in plain text, not in the byte alphabet."""
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


# Chat templates: messages to text, in a sandbox, as the Hugging Face libraries render them.
#
# A template comes with the model's files, so it is not fully trusted: it runs in Jinja's immutable sandbox, with access
# to its arguments only. Clients cannot send templates.

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
