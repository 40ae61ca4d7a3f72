"""Random small tokenizers and chat templates over the product of what public ones do, beside transformers.

Compared are ids of texts with and without special tokens, in one piece and in pieces; texts of ids, whole and as they
stream; what a completion adds to a prompt, where a stop string ends it; chats through the template; and the ids that
end an answer. The reference follows tokenizer.json, as this project does: `PreTrainedTokenizerFast`, and classes that
build the tokenizer anew only where they build the file's.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.parity.outcomes import Outcome

from headway.core.errors import HeadwayError
from headway.runtime.build.checkpoint_facts import eos_ids
from headway.runtime.engine.protocol import OutputDelta
from headway.serving.generation import AnswerAssembler
from headway.serving.generation_job import TextOptions
from headway.serving.messages import read_messages
from headway.serving.tokenizer import ModelTokenizer

Fields = dict[str, Any]

_CORPUS = [
    "the quick brown fox jumps over the lazy dog, and they're 12 years old.", "hello world! hello there  again",
    "def f(x):\n    return x + 1\n", "привет мир, 漢字かな 😀 é", "user assistant system tool <think> reasons",
] * 3  # fmt: skip
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPECIAL = ["<unk>", "<s>", "</s>"]
_TURN = ["<|im_start|>", "<|im_end|>", "<|eot|>", "<tool_call>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% elif m['role'] == 'assistant' %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
    ),
    "parts": (
        "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{%- for p in m.content -%}{% if p.type == 'text' %}"
        "{{ p.text }}{% endif %}{%- endfor -%}<|eot|>{%- endfor -%}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "both": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text | trim }}|{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "tools": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>"
        "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "strict": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content | trim }}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    ),
}
_TEXTS = [
    "hello world", " a b", "a  b ", "", "\n\nhello", "they're 12345", "<s>hello</s> world",
    "<|im_start|>user\nhi<|im_end|>", "x <|eot|> y<tool_call>z", "привет 漢字", "😀é\u0301", " ", "▁a",
    "def f(x):\n    return", "hello<extra> world <more>", "don't  stop</s>", "MASK it", "a" * 40,
]  # fmt: skip


def tokenizer_case(seed: int) -> Outcome:
    """Draw a tokenizer's folder, and compare."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="headway-parity-") as name:
        folder = Path(name, "model")
        folder.mkdir()
        kind = write(folder, rng)
        reference, trouble = _reference(folder)
        try:
            ours = ModelTokenizer.load(folder)
        except HeadwayError as error:
            return Outcome("refused", kind, str(error))
        except Exception as error:
            return Outcome("differs", kind, f"no refusal in one sentence: {error!r}")
        if reference is None:
            return Outcome(
                "alone" if ours.has_text else "refused", kind, trouble if ours.has_text else "token ids only"
            )
        for check in (_ids, _texts, _continued, _chats, _ends):
            found = check(ours, reference, folder, rng)
            if found:
                return Outcome("differs", f"{kind}", f"{check.__name__}: {found}")
        return Outcome("equal", kind)


def _reference(folder: Path) -> tuple[Any, str]:
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        return transformers.AutoTokenizer.from_pretrained(folder), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def write(folder: Path, rng: random.Random) -> str:
    """Write a tokenizer's files and the model's two configurations; return what was drawn."""
    build = rng.choice([*_BUILDS])
    backend = _BUILDS[build](rng)
    config: Fields = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    kind = rng.choice(["plain", "added", "added", "ends", "ends", "template", "template", "split", "prefix", "files"])
    template = rng.choice([*TEMPLATES])
    if kind == "added":
        kind = f"added tokens, {_added(folder, rng, backend, config)}"
    model: Fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "eos_token_id": 2,
    }
    generation: Fields = {}
    if kind == "ends":
        template = rng.choice(["chatml", "llama", "both"])
        _name_ends(folder, rng, backend, config, model, generation)
    if kind == "split":
        config["split_special_tokens"] = rng.choice([True, False])
    if kind == "prefix":
        config["add_prefix_space"] = rng.choice([True, False])
        config["tokenizer_class"] = rng.choice([config["tokenizer_class"], _CLASSES[build]])
    if kind == "plain":
        config |= {"add_bos_token": rng.random() < 0.5, "add_eos_token": rng.random() < 0.5}
        config["clean_up_tokenization_spaces"] = rng.random() < 0.5
        if rng.random() < 0.3:
            config["tokenizer_class"] = _CLASSES[build]
    if type(backend.decoder).__name__ == "Metaspace":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the class would build another decoder
    if config["tokenizer_class"] == "Qwen2Tokenizer":
        config["pad_token"] = "</s>"  # or the class adds one of its own
    if kind == "template":
        kind = f"chat template, {template}"
    backend.save(str(folder / "tokenizer.json"))
    _write_template(folder, rng, config, TEMPLATES[template])
    if kind == "files":
        kind = f"without tokenizer.json, {_remove(folder, rng)}"
    for name, fields in (("tokenizer_config", config), ("config", model), ("generation_config", generation)):
        if fields:
            (folder / f"{name}.json").write_text(json.dumps(fields))
    return f"{kind} ({build})"


def _remove(folder: Path, rng: random.Random) -> str:
    (folder / "tokenizer.json").unlink()
    name = rng.choice(["tokenizer.model", "vocab.json", "tekken.json", "nothing"])
    if name != "nothing":
        (folder / name).write_bytes(b"\x0a\x05hello")
    return name


def _write_template(folder: Path, rng: random.Random, config: Fields, template: str) -> None:
    """Write the chat template in one of the places that it may be in, or in two."""
    place = rng.choice(["file", "config", "list", "both"])
    if place in ("file", "both"):
        (folder / "chat_template.jinja").write_text(template)
    if place != "file":
        other = "{{ 'other' }}" if place == "both" else template
        named = [{"name": "tool_use", "template": "{{ 'tools' }}"}, {"name": "default", "template": other}]
        config["chat_template"] = named if place == "list" else other


def _added(folder: Path, rng: random.Random, backend: Any, config: Fields) -> str:
    """Add tokens in one of the three files, with flags."""
    place = rng.choice(["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
    from tokenizers import AddedToken

    first = backend.get_vocab_size(with_added_tokens=True)
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    tokens = [
        {"content": content, **{flag: rng.random() < 0.3 for flag in flags}}
        for content in rng.sample(["<extra>", "<more>", "MASK", " spaced ", "<|fim|>"], rng.choice([1, 2, 3]))
    ]
    if place == "tokenizer.json":
        backend.add_tokens([AddedToken(**token) for token in tokens])
    elif place == "tokenizer_config.json":
        known = {
            str(index): json.loads(json.dumps(_plain(token)))
            for index, token in backend.get_added_tokens_decoder().items()
        }
        gap = rng.choice([0, 0, 0, 1])
        config["added_tokens_decoder"] = known | {str(first + gap + at): token for at, token in enumerate(tokens)}
    elif place == "special_tokens_map.json":
        named = {"mask_token": tokens[0] | {"special": True}, "additional_special_tokens": [tokens[-1]["content"]]}
        if len(tokens) == 1:
            del named["additional_special_tokens"]
        (folder / place).write_text(json.dumps(named))
    else:
        (folder / place).write_text(json.dumps({token["content"]: first + at for at, token in enumerate(tokens)}))
    return place


def _plain(token: Any) -> Fields:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def _name_ends(
    folder: Path, rng: random.Random, backend: Any, config: Fields, model: Fields, generation: Fields
) -> None:
    """Name the end of an answer in some of the files that may."""
    end = backend.token_to_id("<|im_end|>")
    for fields in (model, generation):
        value = rng.choice([None, 2, end, [2, end], "absent"])
        fields.pop("eos_token_id", None)
        if value != "absent":
            fields["eos_token_id"] = value
    config["eos_token"] = rng.choice(["</s>", "<|im_end|>", {"content": "<|im_end|>", "__type": "AddedToken"}, None])
    if rng.random() < 0.4:
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    if rng.random() < 0.3:
        config["added_tokens_decoder"] = {str(i): _plain(t) for i, t in backend.get_added_tokens_decoder().items()}


def _byte_level(pattern: str | None, *, prefix: bool = False) -> Callable[[random.Random], Any]:
    def build(rng: random.Random) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

        backend: Any = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)
        split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
        if pattern == _QWEN:
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        backend.train_from_iterator(
            _CORPUS,
            trainers.BpeTrainer(
                vocab_size=340, special_tokens=[*_SPECIAL, *_TURN], show_progress=False,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            ),
        )  # fmt: skip
        _around(backend, rng, processors)
        return backend

    return build


def _sentencepiece(form: str) -> Callable[[random.Random], Any]:
    """BPE over characters with a byte fallback, as Llama 2, Mistral, Phi-3 and Yi have it."""

    def build(rng: random.Random) -> Any:
        from tokenizers import (
            AddedToken,
            Tokenizer,
            decoders,
            models,
            normalizers,
            pre_tokenizers,
            processors,
            trainers,
        )

        trained: Any = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        trained.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=150, show_progress=False))
        learnt = json.loads(trained.to_str())["model"]
        pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learnt["vocab"]]
        vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
        merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learnt["merges"]]
        backend: Any = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if form == "legacy":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            stages.append(decoders.Strip(" ", 1, 0))
        elif form == "no prefix":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)
            stages.append(decoders.Strip(" ", 1, 0))
        backend.decoder = decoders.Sequence(stages) if rng.random() < 0.8 else decoders.Metaspace()
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in [*_SPECIAL, *_TURN]])
        _around(backend, rng, processors)
        return backend

    return build


def _unigram(rng: random.Random) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    backend: Any = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("  ", " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=180, special_tokens=[*_SPECIAL, *_TURN], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    _around(backend, rng, processors)
    return backend


def _around(backend: Any, rng: random.Random, processors: Any) -> None:
    """Choose the special tokens that are put around a text."""
    single = rng.choice(["$A", "<s> $A", "<s> $A", "<s> $A </s>"])
    backend.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    )


_BUILDS: dict[str, Callable[[random.Random], Any]] = {
    "GPT-2": _byte_level(None), "GPT-2 with prefix": _byte_level(None, prefix=True), "Qwen": _byte_level(_QWEN),
    "Llama 3": _byte_level(_LLAMA3), "SentencePiece, legacy": _sentencepiece("legacy"),
    "SentencePiece, first": _sentencepiece("first"), "SentencePiece, always": _sentencepiece("always"),
    "SentencePiece, no prefix": _sentencepiece("no prefix"), "Unigram": _unigram,
}  # fmt: skip
_CLASSES = {
    build: "Qwen2Tokenizer"
    if build == "Qwen"
    else "LlamaTokenizerFast"
    if "first" in build
    else "PreTrainedTokenizerFast"
    for build in _BUILDS
}


def _ids(ours: ModelTokenizer, reference: Any, folder: Path, rng: random.Random) -> str:
    for text in [*rng.sample(_TEXTS, 8), "".join(rng.choices(_TEXTS, k=4))]:
        for special in (True, False):
            wanted = reference.encode(text, add_special_tokens=special)
            got = ours.encode(text, add_special_tokens=special)
            if got != wanted:
                return f"{text!r}, special {special}: {got} for {wanted}"
    long = "".join(rng.choices(_TEXTS, k=3000))
    if ours.encode(long, add_special_tokens=True) != reference.encode(long):
        return "a text that is cut"
    return ""


def _drawn(reference: Any, rng: random.Random, count: int) -> list[int]:
    """Return ids: of a text, or any but bytes without a character, which decoders show in more than one way."""
    if rng.random() < 0.5:
        text = "".join(rng.choices(_TEXTS, k=3))
        return list(reference.encode(text, add_special_tokens=False))[:count]
    known = [token for token, ident in reference.get_vocab().items() if not token.startswith("<0x")]
    return list(reference.convert_tokens_to_ids(rng.choices(sorted(known), k=count)))


def _texts(ours: ModelTokenizer, reference: Any, folder: Path, rng: random.Random) -> str:
    for _ in range(6):
        ids = _drawn(reference, rng, 24)
        for skip in (True, False):
            wanted = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            if (got := ours.decode(ids, skip_special_tokens=skip)) != wanted:
                return f"decoded {ids}, skip {skip}: {got!r} for {wanted!r}"
            stream = ours.detokeniser(skip_special_tokens=skip)
            streamed = "".join([*(stream.feed(token) for token in ids), stream.flush()])
            if streamed != wanted:
                return f"streamed {ids}, skip {skip}: {streamed!r} for {wanted!r}"
    return ""


def _continued(ours: ModelTokenizer, reference: Any, folder: Path, rng: random.Random) -> str:
    """A completion's text is what it adds to its prompt's; a stop string ends it at its first place."""
    for _ in range(4):
        prompt = reference.encode(rng.choice(["hello", "the quick", " a", "x</s>", "user: hi"]))
        answer = list(
            reference.encode(rng.choice([" a b", "hello world", "a  b c", "\nx y"]), add_special_tokens=False)
        )
        before, both = (reference.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *answer]))
        if not both.startswith(before):
            continue
        wanted = both[len(before) :]
        stops = [wanted[at : at + 2] for at in range(len(wanted) - 1)]
        stop = rng.choice([*stops, "zz"]) if stops else "zz"
        cut = wanted.partition(stop)[0]
        options = TextOptions(stops=(stop,), continues=True)
        assembler = AnswerAssembler(ours, options, before=prompt)
        text = ""
        for place, token in enumerate(answer):
            last = place == len(answer) - 1
            piece = assembler.feed(OutputDelta(id="x", tokens=(token,), finish="length" if last else None))
            text += piece.text
            if piece.finish is not None:
                break
        if text != cut:
            return f"{prompt} and {answer}, stop {stop!r}: {text!r} for {cut!r}"
    return ""


def _history(rng: random.Random) -> list[Fields]:
    """Return messages of a chat, as clients send them."""

    def content(text: str) -> Any:
        parts = [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]
        return rng.choice([text, text, parts, parts[:1]])

    messages: list[Fields] = [{"role": "user", "content": content("hello world")}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "be brief"})
    if rng.random() < 0.7:
        answer: Fields = {"role": "assistant", "content": content(" an answer ")}
        if rng.random() < 0.3:
            answer["reasoning_content"] = "because"
        messages.append(answer)
        if rng.random() < 0.3:
            call = {"name": "f", "arguments": '{"x": [1, "é"]}'}
            answer["tool_calls"] = [{"id": "c1", "type": "function", "function": call}]
            messages.append({"role": "tool", "tool_call_id": "c1", "content": "42"})
        else:
            messages.append({"role": "user", "content": "and <b> then?"})
    return messages


def _chats(ours: ModelTokenizer, reference: Any, folder: Path, rng: random.Random) -> str:
    """Equal to transformers given the form of content that the template shows, or refused where it shows nothing."""
    source = reference.chat_template
    source = source["default"] if isinstance(source, dict) else source
    for _ in range(3):
        sent = _history(rng)
        prompt = rng.random() < 0.7
        try:
            text = ours.render_chat(read_messages(sent), add_generation_prompt=prompt, variables=None)
        except HeadwayError as error:
            text = str(error)
            if "tool" in text and ("tool_calls" in source or not any("tool" in str(m) for m in sent)):
                return f"{text}: {sent}"
            if "tool" in text:
                continue
        only = "parts" if "for p in m.content" in source and "is string" not in source else "strings"
        form = "both" if "is string" in source else only
        try:
            wanted = reference.apply_chat_template(
                [_formed(message, form) for message in sent], tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:
            if "alternate" not in str(error) or "alternate" not in text:
                return f"{error!r}, here {text!r}"
            continue
        if text != wanted:
            return f"{text!r} for {wanted!r}"
        ids = reference.encode(wanted, add_special_tokens=False)
        if ours.encode(text, add_special_tokens=False) != ids:
            return f"ids of {text!r}"
    return ""


def _formed(message: Fields, form: str) -> Fields:
    """Return the message as transformers is to be given it: content in that form, arguments as an object."""
    message, content = dict(message), message["content"]
    if isinstance(content, list) and form == "strings":
        message["content"] = "".join(part["text"] for part in content)
    if isinstance(content, str) and form == "parts":
        message["content"] = [{"type": "text", "text": content}]
    if "tool_calls" in message:
        call = message["tool_calls"][0]
        function = call["function"] | {"arguments": json.loads(call["function"]["arguments"])}
        message["tool_calls"] = [call | {"function": function}]
    return message


def _ends(ours: ModelTokenizer, reference: Any, folder: Path, rng: random.Random) -> str:
    """Ends are those that transformers' generation has, the tokenizer's own, and the template's end of a turn."""
    wanted: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        wanted |= set(value if isinstance(value, list) else [] if value is None else [value])
    if reference.eos_token_id is not None:
        wanted.add(reference.eos_token_id)
    if (got := set(eos_ids(folder))) != wanted:
        return f"ends {got} for {wanted}"
    source = str(reference.chat_template)
    turn = next((token for token in ("<|im_end|>", "<|eot|>") if token in source), reference.eos_token)
    wanted = {reference.convert_tokens_to_ids(turn)} if turn and turn in reference.get_added_vocab() else set()
    return "" if set(ours.turn_end) == wanted else f"end of a turn {ours.turn_end} for {wanted}: {turn}"
