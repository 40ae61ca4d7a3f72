from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from headway.cli import demo
from headway.core.errors import ConfigError
from headway.runtime.embedded import model_path


@pytest.mark.skipif(not (model_path() / "tokenizer.json").exists(), reason="the embedded model is not built")
def test_the_demo_reports_its_measurements_and_wrong_answers(
    fake_command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fake server answers every prompt with 123: no passkey is right, so the demo must report that and fail."""
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    words = ["--document-tokens", "4K", "--chat-interval", "0.2", "--out", str(tmp_path)]
    words += ["--server-command", f"{fake_command} --answer 123 --speed 5000"]
    assert demo.run(parser.parse_args(words)) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "ladder, adaptive: the document was read in" in out
    assert "times that under ladder" in out
    assert len(json.loads((tmp_path / "convoy.json").read_text())["runs"]) == 2
    assert (tmp_path / "convoy.png").exists()


def test_chats_without_an_interval_are_refused() -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    with pytest.raises(ConfigError, match=r"^--chat-interval is 0\.0; it must be above 0 seconds$"):
        demo.run(parser.parse_args(["--chat-interval", "0"]))


def test_a_demo_answer_is_its_leading_number() -> None:
    answers = (" 84213. Remember", "84213", "the 5", "", None)
    assert [demo.digits(text) for text in answers] == ["84213", "84213", "", "", ""]
