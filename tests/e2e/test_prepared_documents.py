"""A document that `headway prepare` has a server compute: asked about by id."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.cli.main import main
from headway.serving.load.convoy import ServerProcess

WORDS = "The lighthouse keeper writes down every ship that passes. "
QUESTION = "Which ships did pass?"


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "document.txt"
    file.write_text("".join(f"{i}. {WORDS}" for i in range(250)))
    return file


def asked(url: str, **fields: Any) -> tuple[str, int, int]:
    """Return an answer, and the tokens of its prompt, all and cached."""
    body = {"model": "headway-embedded", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    usage = answer["usage"]
    found = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], found


@pytest.mark.long
def test_a_prepared_document_is_asked_about_by_its_id(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "system", "content": document.read_text()}, {"role": "user", "content": QUESTION}]
    arguments = ["--dtype", "float32", "--kv-cache-memory", "32M"]
    with ServerProcess(arguments) as running:
        wanted, tokens, cached = asked(running.url, messages=messages, cache_prompt=False)
        assert cached == 0
        assert main(["prepare", str(document), "--url", running.url, "--ttl", "600"]) == 0
        shown = capsys.readouterr()
        name = shown.out.strip()
        assert re.fullmatch(r"[\d,]+ tokens are kept in memory until 20.*\n", shown.err)
        question = {"messages": messages[1:], "context_id": name}
        answer, length, cached = asked(running.url, **question)
        assert (answer, length) == (wanted, tokens)
        assert cached > tokens - 128
        assert httpx.delete(f"{running.url}/v1/contexts/{name}").json()["deleted"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no-such-file.txt"], "no-such-file.txt cannot be read: No such file or directory"),
        (["{empty}"], "is empty: there is nothing to prepare"),
        (["{binary}"], "is not UTF-8 text: convert it first"),
        (["{document}", "--url", "127.0.0.1"], "is not an address of a server"),
        (["{document}", "--url", "http://127.0.0.1:9"], "is a server there?"),
    ],
)
def test_what_cannot_be_prepared_is_one_sentence(
    words: list[str], says: str, document: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    places = {"empty": tmp_path / "empty", "binary": tmp_path / "binary", "document": document}
    given = [word.format(**places) for word in words]
    if "--url" not in given:
        given += ["--model", "m"]
    assert main(["prepare", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
