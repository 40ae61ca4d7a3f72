"""YAML files whose sizes lie end in one sentence, soon."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.core.strict_yaml import load, read

NINE = "".join(f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: " + "[" * 100_000, "nested more than"),
        ("".join(" " * depth + "a:\n" for depth in range(300)), "nested more than"),
        ("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + NINE, "more than 50000 values"),
        ("a: &a [*a]\n", "an alias stands for what it is a part of"),
        ("a: " + "x" * 300_000, "more than 256 KiB"),
        ("a: " + "9" * 5000, "Exceeds the limit"),
        ("a: 2024-13-45\n", "month"),
    ],
)
def test_a_file_whose_size_lies_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "lie.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read(file)
    assert len(str(caught.value)) < 400


def test_aliases_and_merges_within_the_limits_are_read(tmp_path: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}\n")
    assert read(file) == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


def test_a_key_stands_once_and_mappings_merge() -> None:
    assert load("a: {x: 1, y: 2}\nb: {x: 1}\n1: {}\n'2': [{x: 1}, {x: 2}]") == {
        "a": {"x": 1, "y": 2}, "b": {"x": 1}, 1: {}, "2": [{"x": 1}, {"x": 2}],
    }  # fmt: skip
    with pytest.raises(Exception, match=r"'x' stands there twice(.|\n)*line 1, column 11"):
        load("a: {x: 1, x: 2}")
    # A mapping that itself merges another is merged.
    text = "base: &a {x: 1}\nouter:\n  inner: &b\n    <<: *a\n    x: 2\nc:\n  <<: [*b, *a]\n"
    assert load(text) == {"base": {"x": 1}, "outer": {"inner": {"x": 2}}, "c": {"x": 2}}
    with pytest.raises(Exception, match=r"'x' stands there twice(.|\n)*line 3, column 25"):
        load("base: &a {x: 1}\nc:\n  inner: {<<: *a, x: 2, x: 3}\n")
