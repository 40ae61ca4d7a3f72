"""The notebook of examples/ runs from top to bottom as it stands, and keeps no output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.policy.iteration.ordering import POLICIES

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "chats-behind-documents.ipynb"


def cells(kind: str) -> list[dict[str, Any]]:
    book = json.loads(NOTEBOOK.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    return [cell for cell in book["cells"] if cell["cell_type"] == kind]


@pytest.mark.long
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    names: dict[str, Any] = {}
    for cell in cells("code"):
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}: {cell['id']}", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(r"chat +\d+ requests, TTFT P50", printed)
    # Every policy that there is, and one of the reader's own; on each seed the ladder is the best, fcfs the worst.
    assert list(names["POLICIES"][:-1]) == list(POLICIES)
    shares = names["shares"]
    for seed in range(3):
        drawn = {name: found[seed] for name, found in shares.items()}
        assert drawn["ladder"] > max(drawn.values()) - 0.02
        assert min(drawn, key=lambda name: drawn[name]) == "fcfs"
    assert names["figure"].axes[0].get_legend_handles_labels()[1] == ["chat", "document"]
    # The page of the paper has the rows of the command.
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["reproduce", "medha"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    rows = list(names["paper"].rows())
    assert all(row.claim[:20] in page for _, row in rows)
    assert printed.count("| paper ") == len(rows) > 5
    assert {claim.verdict for claim in names["report"].rows} == {"holds"}


def test_the_notebook_holds_no_output_and_names_what_there_is() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells("code"))
    text = "".join("".join(cell["source"]) for cell in cells("markdown"))
    paths = re.findall(r"`((?:docs|examples)/[\w./-]+\w)`", text)
    assert paths
    assert all((ROOT / path).exists() for path in paths)
