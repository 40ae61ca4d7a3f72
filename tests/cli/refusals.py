"""A command that refuses its work: one line on stderr, nothing on stdout, and status 2."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headway.cli.main import main


def refusal(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command in this process; return the line that it says."""
    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("headway: error: ")
    assert said.err.count("\n") == 1
    return said.err
