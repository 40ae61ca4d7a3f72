"""Tokenizer of a checkpoint's folder; long texts are cut where their tokens stay the same, and are encoded in a process
of its own within bounds of memory.

Optional: without it, ids only.

All functions block. A server's long texts are encoded by processes of their own (`body_worker`), to which this is
pickled, others by the body reader's threads.
"""

from __future__ import annotations

import json
import logging
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import CheckpointError, RequestError
from headway.core.files import JsonFields, read_input, read_json
from headway.serving.text import (
    ByteLevelDetokenizer,
    ChatTemplate,
    IncrementalDetokenizer,
    SilentDetokenizer,
    WindowDetokenizer,
    byte_level_bytes,
)

if TYPE_CHECKING:
    import tokenizers


BYTES_PER_CHARACTER = 512
"""Memory that tokenising one character takes at most, about: measured, 85 to 400 bytes."""


# Cutting long texts where their tokens are the same: the tokens of the pieces, joined, are those of the whole.
#
# The tokenizer's own pre-tokenizer says where. It matches a pattern from left to right, so that in a window that begins
# where a match does, all matches but the last ones are those of the whole text, in any script: each depends on what it
# covers and on the character behind it. A cut is made at the begin of a match, or behind an added token. Patterns that
# look further, and tokenizers without a pattern (SentencePiece), are given whole texts.

PIECE_CHARACTERS = 16 << 10
"""Longest piece of a long text, unless there is no cut in it: some 3 ms of tokenisation."""
LONGEST_RUN = 256 << 10
"""Most characters that are tokenised together: some 2 s of tokenisation."""

_UNSURE = 2
"""Matches at the end of a window that more text may change: `don` and `'` may be the word `don't`."""
_LOOKS_FURTHER = re.compile(r"\(\?[=!<]|(?<![\[\\])\^|(?<!\\)\$|\\[bBAzZGK]")
_FORMS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase"))
"""Normalizers that leave what they made as it is, and its parts as well."""
_BY_MATCH = frozenset(("ByteLevel", "Digits", "Split", "Punctuation", "BertPreTokenizer", "Whitespace"))
"""Pre-tokenizers that look at each earlier match alone, so that they may follow one that cuts."""


class TextPieces:
    """Cutter of one tokenizer's texts. Made by `of`."""

    def __init__(
        self, splitter: Any, normalizer: tokenizers.normalizers.Normalizer | None, added: list[str], spaces: bool
    ) -> None:
        self._splitter = splitter
        self._normalizer = normalizer
        # As the library finds them: the first, and of those the longest.
        self._added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")
        self._longest = max(map(len, added), default=0)
        # A piece that does not begin with a space would get one.
        self._spaces = spaces

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, description: Mapping[str, Any]) -> TextPieces | None:
        """Make the cutter for a tokenizer and its tokenizer.json; None where no exact cut is known."""
        # With `split_special_tokens` special ones are text like any other.
        split = bool(backend.encode_special_tokens)
        added = [each for each in description.get("added_tokens") or [] if not (split and each.get("special"))]
        normalizer = description.get("normalizer")
        # Such added tokens depend on, or take, what is beside them; `normalized` ones are sought in other text.
        besides = ("single_word", "lstrip", "rstrip", *(("normalized",) if normalizer else ()))
        if any(token.get(name) for token in added for name in besides):
            return None
        if not {stage.get("type") for stage in _stages(normalizer, "normalizers")} <= _FORMS:
            return None
        if (description.get("model") or {}).get("dropout"):
            return None
        splitter = _splitter(description.get("pre_tokenizer"))
        if splitter is None:
            return None
        spaces = any(stage.get("add_prefix_space") for stage in _stages(description["pre_tokenizer"], "pretokenizers"))
        return cls(splitter, backend.normalizer, [token["content"] for token in added], spaces)

    def cut(self, text: str, most: int = PIECE_CHARACTERS) -> Iterator[str]:
        """Yield pieces of at most `most` characters, where there are cuts, whose concatenation is the normalized text.
        Raises RequestError for a text that has too many without one.

        A text that is not normalized is one piece where added tokens would come to be by that."""
        if self._normalizer is not None:
            normal = self._normalizer.normalize_str(text)
            if normal != text and self._added.findall(normal) != self._added.findall(text):
                yield text
                return
            text = normal
        begin = 0
        while begin < len(text):
            end = self._next(text, begin, most)
            yield text[begin:end]
            begin = end

    def _next(self, text: str, begin: int, most: int) -> int:
        """Return the last cut in the `most` characters from `begin` on, or the first one behind them."""
        while (end := begin + most) < len(text):
            segment = begin
            for found in self._added.finditer(text, begin, min(len(text), end + self._longest)):
                if found.start() >= end:
                    break
                segment = found.end()
            if segment >= end:
                return segment
            matches = self._splitter.pre_tokenize_str(text[segment:end])
            # Not at the first, which may begin with what stands before.
            for _, (start, _) in reversed(matches[1 : -_UNSURE - 1]):
                at = segment + int(start)
                # Of white space, the last character belongs to what follows: behind it is no cut.
                if not text[at - 1].isspace() and (not self._spaces or text[at] == " "):
                    return at
            if segment > begin and not self._spaces:
                return segment
            most *= 2
            if most > LONGEST_RUN:
                raise RequestError(
                    f"the text has {LONGEST_RUN} characters in a row that can only be tokenised together: send token "
                    "ids, or text with spaces",
                    "prompt",
                )
        return len(text)


def _stages(part: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    """Return the members of a sequence, else the component itself."""
    if part is None:
        return []
    return list(part.get(members, ())) if part.get("type") == "Sequence" else [part]


def _splitter(pre_tokenizer: Mapping[str, Any] | None) -> Any:
    """Return the first stage, where it matches a pattern that looks at one more character and the others follow it."""
    from tokenizers import Regex, pre_tokenizers

    stages = _stages(pre_tokenizer, "pretokenizers")
    if not stages or not {stage.get("type") for stage in stages[1:]} <= _BY_MATCH:
        return None
    first = stages[0]
    if first.get("type") == "ByteLevel" and first.get("use_regex", True):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    pattern = (first.get("pattern") or {}).get("Regex")
    plain = first.get("type") == "Split" and first.get("behavior") == "Isolated" and not first.get("invert")
    if not plain or not pattern or _LOOKS_FURTHER.search(pattern.replace(r"\s+(?!\S)", "")):
        return None
    return pre_tokenizers.Split(Regex(pattern), "isolated")


DEFAULT_MEMORY = 1 << 30
"""Memory for texts that cannot be cut, in bytes."""
_OTHER_FILES = ("tokenizer.model", "vocab.json", "tekken.json", "tokenizer.tiktoken", "spiece.model", "qwen.tiktoken")
"""Files of tokenizers that need a library each."""

log = logging.getLogger("headway.server")


class ModelTokenizer:
    """One model's tokenizer and chat template. Immutable after construction; safe to use from several threads.

    memory: bytes that tokenising a text may take; split_special_tokens: text never becomes a special token;
    sampling_defaults: what requests get that say nothing else (`read_sampling_defaults`).
    """

    def __init__(
        self, backend: tokenizers.Tokenizer | None, *, chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None, memory: int = DEFAULT_MEMORY,
        split_special_tokens: bool = False, sampling_defaults: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self._backend = backend
        self.sampling_defaults = sampling_defaults or {}
        if backend is not None:
            # What the library saves of a tokenizer does not hold this.
            backend.encode_special_tokens = split_special_tokens
        self._made_of: dict[str, Any] = {
            "chat_template": chat_template,
            "special_tokens": special_tokens,
            "memory": memory,
            "split_special_tokens": split_special_tokens,
            "sampling_defaults": sampling_defaults,
        }
        # A text that cannot be cut takes its memory at once; a process tokenises one such text at a time.
        self._most_characters = memory // BYTES_PER_CHARACTER
        self._pieces: TextPieces | None = None
        self._template: ChatTemplate | None = None
        if chat_template:
            self._template = ChatTemplate(chat_template, special_tokens or {})
        self._turn_end: tuple[int, ...] = ()
        added = backend.get_added_tokens_decoder() if backend is not None else {}
        # As the library skips them: by their text, which a normalizer may change.
        self._special = frozenset(
            ident for ident, token in added.items() if token.special and backend and not backend.decode([ident])
        )
        # Bytes of each token id of a byte-level BPE vocabulary; None for other tokenizers.
        self._bytes = _byte_table(backend) if backend is not None else None
        self._around: tuple[list[int], list[int]] = ([], [])
        if backend is not None:
            description = json.loads(backend.to_str())
            self._around, exact = _special_around(backend)
            self._pieces = TextPieces.of(backend, description) if exact else None
            if self._template is not None:
                tokens = {token.content: ident for ident, token in added.items()}
                end = self._template.turn_end(tokens)
                self._turn_end = () if end is None else (tokens[end],)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        chat_template: str | None = None,
        memory: int = DEFAULT_MEMORY,
        default_template: str | None = None,
    ) -> ModelTokenizer:
        """Load a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja; each may be missing.

        chat_template: a file to use instead of the folder's own, or the template's text, which has a brace;
        default_template: source for a model without one.
        Raises CheckpointError for an unreadable file.
        """
        config = _read_json(folder / "tokenizer_config.json")
        # As in transformers: newer configurations, which have this field, hold all special tokens themselves.
        if "added_tokens_decoder" not in config:
            config |= _read_json(folder / "special_tokens_map.json")
        template = chat_template
        if chat_template is None or "{" not in chat_template:
            named = Path(chat_template) if chat_template else folder / "chat_template.jinja"
            template = _read_template(named, config, chat_template is not None)
        defaults = read_sampling_defaults(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            others = [name for name in _OTHER_FILES if (folder / name).is_file()]
            if others:
                raise CheckpointError(
                    f"{folder} has {others[0]} but no tokenizer.json, which is what is read here: make one with "
                    "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
                )
            return cls(None, sampling_defaults=defaults)
        # One thread encodes one text: how many do is decided by the body reader.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        try:
            backend = tokenizers.Tokenizer.from_buffer(read_input(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {str(error)[:300]}") from None
        # tokenizer.json may hold the padding and truncation of training, which would alter prompts.
        backend.no_padding()
        backend.no_truncation()
        add_tokens(backend, config, _read_json(folder / "added_tokens.json"), str(folder))
        check_prefix_space(backend, config, str(folder))
        if template is None and default_template is not None:
            log.warning("the model has no chat template: chats use a plain one, a line `role: text` for each message")
            template = default_template
        return cls(
            backend, chat_template=template, special_tokens=_special_tokens(config), memory=memory,
            split_special_tokens=config.get("split_special_tokens") is True,
        )  # fmt: skip

    @classmethod
    def none(cls) -> ModelTokenizer:
        """Make a tokenizer for a model without one: prompts must be token ids, and answers' text is empty."""
        return cls(None)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it is made of."""
        return partial(ModelTokenizer, **self._made_of), (self._backend,)

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer; without it only token ids are served."""
        return self._backend is not None

    @property
    def has_template(self) -> bool:
        """Whether messages of a chat can be turned into a prompt."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text. Raises RequestError when there is no tokenizer."""
        return self.encode_long(text, add_special_tokens=add_special_tokens).tolist()

    def encode_long(self, text: str, *, add_special_tokens: bool, most_tokens: int | None = None) -> array[int]:
        """Return the token ids of a text as int32; with `most_tokens`, refuse one of more without tokenising all of it,
        where it can be cut.

        Raises RequestError for such a text, for one that takes too much memory, and when there is no tokenizer.
        """
        if self._backend is None:
            raise RequestError("this model has no tokenizer: send the prompt as an array of token ids", "prompt")
        if self._pieces is None or len(text) <= PIECE_CHARACTERS:
            return self._encoded(text, add_special_tokens)
        before, after = self._around if add_special_tokens else ([], [])
        ids = array("i", before)
        for piece in self._pieces.cut(text):
            if most_tokens is not None and len(ids) > most_tokens:
                raise RequestError(
                    f"This model's maximum context length is {most_tokens} tokens. However, the text has more", "prompt"
                )
            ids.extend(self._encoded(piece, add_special_tokens=False))
        ids.extend(after)
        return ids

    def _encoded(self, text: str, add_special_tokens: bool) -> array[int]:
        assert self._backend is not None
        if len(text) > self._most_characters:
            raise RequestError(
                f"the text has {len(text)} characters in a row that can only be tokenised at once; this server's "
                f"memory for that allows {self._most_characters}: send token ids, or text with spaces",
                "prompt",
            )
        # A batch of one: `encode` of the library would hold the interpreter's lock all the time.
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("i", found.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of all `ids` together; empty when there is no tokenizer."""
        if self._backend is None:
            return ""
        # A batch of one, as for `encode`.
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def detokeniser(self, *, skip_special_tokens: bool, before: Sequence[int] = ()) -> IncrementalDetokenizer:
        """Make an incremental decoder for one answer; `before`: tokens whose text it continues, the last of them."""
        if self._backend is None:
            return SilentDetokenizer()
        skip = self._special if skip_special_tokens else frozenset()
        if self._bytes is not None:
            return ByteLevelDetokenizer(self._bytes, skip)
        return WindowDetokenizer(self._backend, skip, before)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, for log-probability reports; may be a part of a UTF-8 character."""
        if self._backend is None:
            return b""
        if self._bytes is not None:
            return self._bytes.get(token, b"")
        piece = self._backend.id_to_token(token) or ""
        # SentencePiece: byte fallback tokens are spelt <0xNN>, and U+2581 stands for a space.
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode() if token not in self._special else piece.encode()

    @property
    def turn_end(self) -> tuple[int, ...]:
        """The special token that the chat template puts behind an assistant's message; empty where it puts none."""
        return self._turn_end

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, variables: Mapping[str, Any] | None
    ) -> str:
        """Apply the chat template. Raises RequestError when the model has no template or no tokenizer."""
        if self._template is None:
            what = "chat template" if self.has_text else "tokenizer"
            raise RequestError(f"'messages' cannot be used: this model has no {what}; use /v1/completions", "messages")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)


def _special_around(backend: tokenizers.Tokenizer) -> tuple[tuple[list[int], list[int]], bool]:
    """Return the special tokens that the tokenizer puts before and behind a text, and whether it does only that."""
    with_special, plain = backend.encode("a", add_special_tokens=True), backend.encode("a", add_special_tokens=False)
    first = next((at for at, special in enumerate(with_special.special_tokens_mask) if not special), 0)
    last = first + len(plain.ids)
    before, after = with_special.ids[:first], with_special.ids[last:]
    return (before, after), bool(plain.ids) and with_special.ids == before + plain.ids + after


def _byte_table(backend: tokenizers.Tokenizer) -> dict[int, bytes] | None:
    """Return the bytes of each token id of a byte-level BPE tokenizer (its only decoder is ByteLevel); else None."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    stages = decoder.get("decoders", [decoder])
    # Any further decoder stage (metaspace, strip) would change text beyond the bytes of single tokens.
    if [stage.get("type") for stage in stages] != ["ByteLevel"]:
        return None
    return {ident: byte_level_bytes(piece) for piece, ident in backend.get_vocab(with_added_tokens=True).items()}


_SAMPLING = {
    "temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "top_k": (-1, 2**31 - 1), "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 100.0),
}  # fmt: skip
"""Sampling settings of generation_config.json, with what requests may give."""


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling settings that generation_config.json names; requests that leave one out get it, as in vLLM.

    Raises CheckpointError for a value that no request may give."""
    path = folder / "generation_config.json"
    found = {name: value for name, value in _read_json(path).items() if name in _SAMPLING and value is not None}
    for name in found:
        JsonFields(found, str(path)).number(name, None, *_SAMPLING[name])
    if found:
        said = ", ".join(f"{name} {value:g}" for name, value in sorted(found.items()))
        log.info("requests that do not say otherwise get the checkpoint's sampling settings: %s", said)
    return found


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token` and the like as strings; older files hold objects with `content`."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _read_template(path: Path, config: Mapping[str, Any], required: bool) -> str | None:
    """Return the chat template: the separate file's, else the one in tokenizer_config.json (its "default" of several).

    required: raise CheckpointError when the separate file is missing.
    """
    try:
        return read_input(path).decode()
    except FileNotFoundError:
        if required:
            raise CheckpointError(f"chat template {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"chat template {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    given = config.get("chat_template")
    if isinstance(given, list):
        named = {str(item.get("name")): item.get("template") for item in given if isinstance(item, dict)}
        if "default" not in named:
            raise CheckpointError(
                f"{path.parent}: of the chat templates {', '.join(map(repr, named))} none is the default: choose one "
                "with --chat-template"
            )
        given = named["default"]
    return given if isinstance(given, str) else None


# What the files beside tokenizer.json change in it, as transformers has it. What contradicts it is refused.

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word")
_PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that take tokenizer.json as it is."""


def add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], older: Mapping[str, Any], origin: str) -> None:
    """Add tokens that tokenizer.json lacks, or lacks as special ones.

    config: tokenizer_config.json with special_tokens_map.json; older: added_tokens.json, which counts where `config`
    has no `added_tokens_decoder`. Raises CheckpointError for an entry that is no token, and for one whose id is taken.
    """
    import tokenizers

    wanted: dict[str, tokenizers.AddedToken] = {}
    ids: dict[str, int] = {}
    try:
        special = _named_special(config)
        if "added_tokens_decoder" in config:
            for index, token in sorted(config["added_tokens_decoder"].items(), key=lambda item: int(item[0])):
                fields = {name: value for name, value in token.items() if name != "__type"}
                wanted[token["content"]], ids[token["content"]] = tokenizers.AddedToken(**fields), int(index)
        else:
            for content, index in sorted(older.items(), key=lambda item: int(item[1])):
                is_special = content in special
                wanted[content] = tokenizers.AddedToken(content, special=is_special, normalized=not is_special)
                ids[content] = int(index)
        for content, token in special.items():
            flags = {name: token[name] for name in _FLAGS if name in token} if isinstance(token, dict) else {}
            wanted.setdefault(content, tokenizers.AddedToken(content, special=True, **flags))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{origin}: the added tokens cannot be read: {error!r}") from None
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    # Those with ids first, by id: the library numbers new tokens as they come.
    backend.add_tokens([token for content, token in wanted.items() if content not in known])
    for content, index in ids.items():
        if backend.token_to_id(content) != index:
            raise CheckpointError(
                f"{origin}: the added token {content!r} has the id {index}, but the tokenizer.json makes it "
                f"{backend.token_to_id(content)}: save the tokenizer again with transformers"
            )


def _named_special(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens that a configuration names, by content: text, or an object with flags."""
    given = [config.get(name) for name in _NAMED]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(name) or []
        given += more.values() if isinstance(more, dict) else more
    found: dict[str, Any] = {}
    for token in given:
        if token:
            found.setdefault(token["content"] if isinstance(token, dict) else str(token), token)
    return found


def check_prefix_space(backend: tokenizers.Tokenizer, config: Mapping[str, Any], origin: str) -> None:
    """Raise CheckpointError where `add_prefix_space` says one thing and tokenizer.json does another.

    Classes of transformers that build the tokenizer anew obey the field, others the file.
    """
    wanted = config.get("add_prefix_space")
    if not isinstance(wanted, bool) or config.get("tokenizer_class") in _PLAIN_CLASSES:
        return
    description = json.loads(backend.to_str())
    stages = [
        *_stages(description.get("normalizer"), "normalizers"),
        *_stages(description.get("pre_tokenizer"), "pretokenizers"),
    ]
    does = any(
        stage["type"] == "Prepend"
        or (stage["type"] == "Metaspace" and stage.get("prepend_scheme", "always") != "never")
        or (stage["type"] == "ByteLevel" and stage.get("add_prefix_space"))
        for stage in stages
    )
    if wanted != does:
        raise CheckpointError(
            f"{origin}: tokenizer_config.json has 'add_prefix_space' {str(wanted).lower()}, but tokenizer.json puts "
            f"{'a' if does else 'no'} space before a text: save the tokenizer again with transformers"
        )
