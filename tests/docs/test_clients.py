"""The table of clients is of the clients that the script runs, all of which work; each environment has its lock."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.clients.environments import LOCKS, PROMETHEUS, REQUIREMENTS, VLLM
from benchmarks.clients.run import CLIENTS, HERE, Outcome, page, run_script
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "clients.md").read_text()


def rows(text: str) -> list[list[str]]:
    return [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")][1:]


def test_every_client_has_rows_and_none_of_them_says_that_it_fails() -> None:
    named = [cells[0] for cells in rows(PAGE) if len(cells) == 4]
    assert named == [client.name for client in CLIENTS]
    assert "**fails**" not in PAGE
    assert "not run" not in PAGE
    assert all((HERE / client.script).is_file() for client in CLIENTS)


def test_a_client_that_fails_or_is_not_to_be_had_has_a_row_that_says_so() -> None:
    first, second = CLIENTS[:2]
    text = page(
        [
            Outcome(first, "1.0", (("chat", "8 tokens"),), failure="Traceback"),
            Outcome(second, "", (), absent="no wheel"),
        ]
    )
    assert "| chat | 8 tokens |" in text
    assert "|  | **fails** |" in text
    assert f"| {second.name} |  |  | not run: no wheel |" in text


def test_a_client_that_does_not_end_fails_and_the_others_still_run() -> None:
    succeeded, printed = run_script([sys.executable, "-c", "import time; time.sleep(600)"], {}, 0.5)
    assert not succeeded
    assert "it did not end within 0.5 s" in printed
    assert run_script([sys.executable, "-c", "print(7)"], {}, 600) == (True, "7\n")


def test_every_environment_is_locked_with_what_it_is_for() -> None:
    assert {client.environment for client in CLIENTS} == {*REQUIREMENTS, VLLM, PROMETHEUS}
    for name, asked in REQUIREMENTS.items():
        lines = (LOCKS / f"{name}.lock").read_text().splitlines()
        pinned = dict(re.fullmatch(r"([a-z0-9-]+)==([0-9][A-Za-z0-9.]*)", line).groups() for line in lines[1:])
        for requirement in map(Requirement, asked):
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])
