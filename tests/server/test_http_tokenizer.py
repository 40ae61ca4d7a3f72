"""Loading tokenizers and chat templates from model folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import CheckpointError, ConfigError, RequestError
from headway.serving.chat_template import ChatTemplate
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


def test_special_tokens_are_added_by_the_rule(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.encode("a", add_special_tokens=True)[0] == 0
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 0


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


def test_template_that_does_not_parse() -> None:
    with pytest.raises(ConfigError, match="Jinja"):
        ChatTemplate("{% if %}", {})


def test_ids_and_chat_text_equal_those_of_transformers(folder: Path) -> None:
    """The same ids and the same chat text as the reference library."""
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>")
    reference.chat_template = (folder / "chat_template.jinja").read_text()
    ours = ModelTokenizer.load(folder)
    for text in ("hello wörld", " a  b\n", "😀"):
        assert ours.encode(text, add_special_tokens=True) == reference.encode(text)
    rendered = ours.render_chat(USER, add_generation_prompt=True, variables=None)
    assert rendered == reference.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    ids = reference.apply_chat_template(USER, tokenize=True, add_generation_prompt=True)
    ids = ids["input_ids"] if hasattr(ids, "keys") else ids
    assert ours.encode(rendered, add_special_tokens=False) == list(ids)
