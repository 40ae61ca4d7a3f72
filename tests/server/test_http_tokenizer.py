"""Loading tokenizers and chat templates from model folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.fake_engine import FakeEngine

from headway.core.errors import CheckpointError, ConfigError, RequestError
from headway.serving.text import ChatTemplate
from headway.serving.tokenizer import ModelTokenizer

USER = [{"role": "user", "content": "hi <&> é"}]


@pytest.fixture
def folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))


def _render(folder: Path, **more: Any) -> str:
    return ModelTokenizer.load(folder, **more).render_chat(USER, add_generation_prompt=True, variables=None)


def test_template_file_wins_over_the_config(folder: Path, tmp_path: Path) -> None:
    assert _render(folder) == "<s>[user]hi <&> é\n[assistant]"
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[0].content }}")
    assert _render(folder, chat_template=str(other)) == "hi <&> é"
    (folder / "chat_template.jinja").unlink()
    assert _render(folder) == "not this one"


def test_named_templates_and_none(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": "tool", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "</s>"}))
    assert _render(folder) == "</s>"
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        _render(folder)


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(tmp_path)
    assert not tokenizer.has_text
    assert tokenizer.decode([1, 2]) == ""
    with pytest.raises(RequestError, match="token ids"):
        tokenizer.encode("x", add_special_tokens=True)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_broken_files_are_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=name):
        ModelTokenizer.load(folder)


def test_missing_template_file_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.jinja"):
        ModelTokenizer.load(folder, chat_template=str(folder / "nowhere.jinja"))


def test_a_template_may_be_given_as_text(folder: Path) -> None:
    assert _render(folder, chat_template="<{{ messages[0].content }}>") == "<hi <&> é>"
    with pytest.raises(ConfigError, match="the chat template is not a valid Jinja template"):
        ModelTokenizer.load(folder, chat_template="{{ messages[0].content }")


def test_templates_support_break_generation_tojson_and_variables() -> None:
    source = (
        "{%- for message in messages %}\n"
        "  {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "  {% generation %}{{ message | tojson }}{% endgeneration %}\n"
        "{%- endfor %}{{ strftime_now('%%') }}{{ flag }}"
    )
    template = ChatTemplate(source, {})
    assert template.render(USER, variables={"flag": 7}).strip() == '{"role": "user", "content": "hi <&> é"}%7'


def test_blocks_leave_no_white_space() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n", {}
    )
    assert template.render(USER) == "user\n"


ATTACKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages.__init__.__globals__ }}",
    "{% include 'etc/passwd' %}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ nothing.at.all }}",
    "{{ messages[0] + 1 }}",
]


@pytest.mark.parametrize("source", ATTACKS)
def test_templates_are_confined(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        ChatTemplate(source, {}).render(USER)


def test_a_folder_with_another_kind_of_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"has tokenizer\.model but no tokenizer\.json"):
        ModelTokenizer.load(folder)


@pytest.mark.anyio
async def test_a_chat_ends_at_its_templates_end_of_a_turn(connect: Any, engine: FakeEngine, folder: Path) -> None:
    """None of the model's files names it: the engine is told with each chat, and with no completion."""
    description = json.loads((folder / "tokenizer.json").read_text())
    end = len(description["model"]["vocab"])
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": end}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"extra_special_tokens": ["<|im_end|>"]}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}")
    tokens = ModelTokenizer.load(folder)
    (end,) = tokens.turn_end
    async with connect(tokens) as client:
        await client.post("/v1/chat/completions", json={"model": "fake-model", "messages": USER, "max_tokens": 1})
        await client.post("/v1/completions", json={"model": "fake-model", "prompt": "hi", "max_tokens": 1})
    chat, completion = (submit.params.stop_token_ids for submit in engine.submits)
    assert (chat, completion) == ((end,), ())


@pytest.mark.anyio
async def test_a_completion_keeps_the_space_before_its_first_word(connect: Any, tmp_path: Path) -> None:
    """A decoder of SentencePiece's kind drops it; the engine says the prompt again."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {
        piece: index for index, piece in enumerate(["<unk>", "</s>", "\u2581", "a", "b", "\u2581a", "\u2581b"])
    }
    backend: Any = Tokenizer(models.BPE(vocabulary, [("\u2581", "a"), ("\u2581", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    asked = {"model": "fake-model", "prompt": "a b", "max_tokens": 2}
    async with connect(ModelTokenizer.load(tmp_path)) as client:
        texts = [
            (await client.post("/v1/completions", json={**asked, **more})).json()["choices"][0]["text"]
            for more in ({}, {"echo": True}, {"stop": [" b"]})
        ]
    assert texts == [" a b", "a b a b", " a"]
