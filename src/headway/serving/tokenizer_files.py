"""What the files beside tokenizer.json change in it, as transformers has it. What contradicts it is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.core.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

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
        special = _special_tokens(config)
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


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
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
    stages = [*_stages(description.get("normalizer")), *_stages(description.get("pre_tokenizer"))]
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


def _stages(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return list(part.get("normalizers") or part.get("pretokenizers") or ()) if part["type"] == "Sequence" else [part]
