"""`--report`: one HTML page that needs nothing else, with the sentence, tables and numbers of the same command."""

from __future__ import annotations

import json
import re
import sys
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import pytest
from scripts.headless_browser import browser, missing_browser
from tests.cli.refusals import refusal
from tests.cli.test_screens import SCENARIO
from tests.helpers.report_pages import ReportPage

from headway.cli.main import main
from headway.sim.report.page import MOST_POINTS, ReportChart, write_page

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</script><script>alert(1)</script>"
QUESTION = """
model: llama-3-8b
accelerators: [{name: h100-80gb, most: 2}]
demands: {chat: {ttft_p90_s: 0.5}}
latency: {source: roofline}
search: {tp: [1], stages: [1], t_target_s: [0.05]}
workload: {qps: 1.0, requests: 60, mix: [{class: chat, share: 1.0, prompt: "uniform:500-700", output: "uniform:10-20"}]}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO.replace("name: two lengths", f'name: "{HOSTILE}"'))
    return file


def checked(file: Path) -> ReportPage:
    """Return the page, if it is one file for a browser without a network, and no word of a user is markup."""
    page = ReportPage(file)
    assert file.stat().st_size < 400_000
    # Nothing is fetched: no element names an address, and the policy allows none.
    assert not [tag for tag in page.tags if {"src", "href", "action", "data", "srcset"} & tag[1].keys()]
    assert "url(" not in page.source.partition("<script")[0]
    assert "@import" not in page.source
    policy = next(str(about["content"]) for _, about in page.tags if about.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ")
    # The only script that runs is the page's own.
    script = b64encode(sha256(page.scripts[""].encode()).digest()).decode()
    assert policy.endswith(f"script-src 'sha256-{script}'")
    assert [about.get("type") for tag, about in page.tags if tag == "script"] == ["application/json", None]
    return page


def test_a_sweep_s_page_has_the_sentence_the_table_and_the_numbers_of_the_json(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, body = tmp_path / "new" / "page.html", tmp_path / "out.json"
    words = ["compare", str(scenario), "--set", "run.window_s=20", "--jobs", "1"]
    assert main([*words, "--report", str(file), "--json", str(body)]) == 0
    page, data, printed = checked(file), json.loads(body.read_text()), capsys.readouterr().out
    assert " ".join(page.text[0].split()) in " ".join(printed.split())
    for row in page.cells[1:]:
        assert re.search(r"\s+".join(map(re.escape, filter(None, row))), printed), row
    shares, waits = page.charts
    assert (shares["unit"], waits["unit"]) == ("share", "seconds")
    assert shares["words"] == [point["at"]["policy.policy"] for point in data["points"]]
    assert shares["lines"].keys() == {"chat"}
    for name in ("chat", "document"):
        blocks = [
            next(block for block in point["mean"]["classes"] if block["class"] == name) for point in data["points"]
        ]
        assert waits["lines"][name] == [
            [at, pytest.approx(block["ttft_s"]["p99"], rel=1e-3)] for at, block in enumerate(blocks)
        ]
        if name == "chat":
            assert shares["lines"][name] == [
                [at, pytest.approx(block["good_share"], abs=1e-3)] for at, block in enumerate(blocks)
            ]


def test_a_point_s_page_has_a_dot_a_request(scenario: Path, tmp_path: Path) -> None:
    file, rows = tmp_path / "page.html", tmp_path / "rows.csv"
    assert main(["simulate", str(scenario), "--jobs", "1", "--report", str(file), "--requests", str(rows)]) == 0
    page = checked(file)
    assert HOSTILE.replace("<", "&lt;").replace(">", "&gt;") in page.source
    by_arrival, by_length = page.charts
    requests = [line.split(",") for line in rows.read_text().splitlines()[1:]]
    for name in ("chat", "document"):
        came = [[float(row[2]), float(row[3]), float(row[6])] for row in requests if row[1] == name and row[6]]
        for chart, column in ((by_arrival, 0), (by_length, 1)):
            drawn, known = chart["lines"][name], sorted([row[column], row[2]] for row in came)
            assert len(drawn) == len(known) > 3
            assert all(one == pytest.approx(other, rel=1e-3) for one, other in zip(drawn, known, strict=True))


def test_a_plan_s_page_lists_every_candidate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question, file = tmp_path / "question.yaml", tmp_path / "page.html"
    question.write_text(QUESTION)
    assert main(["plan", str(question), "--jobs", "1", "--json", "--report", str(file)]) == 0
    data, page = json.loads(capsys.readouterr().out), checked(file)
    assert page.text[0].startswith(f"Cheapest plan: {data['best']['plan']}")
    listed = page.cells[next(i for i, row in enumerate(page.cells) if row[0] == "candidate") + 1 :]
    assert len(listed) == data["simulated"]
    best = next(row for row in listed if row[0] == data["best"]["plan"])
    share = max(each["worst_s"] / each["limit_s"] for each in data["best"]["demands"])
    assert best[2:] == [f"{data['best']['cost']:g}", f"{share:.0%}", "meets all limits"]
    assert [data["best"]["cost"], pytest.approx(share, rel=1e-3)] in page.charts[0]["lines"]["meets all limits"]


def test_a_page_of_a_paper_and_of_one_of_its_figures(tmp_path: Path) -> None:
    file, body = tmp_path / "page.html", tmp_path / "out.json"
    assert main(["reproduce", "medha", "--report", str(file)]) == 0
    assert re.match(r"\d+ claims, each once: ", checked(file).text[0])
    assert main(["reproduce", "medha.eq1", "--report", str(file), "--json", str(body)]) == 0
    page, data = checked(file), json.loads(body.read_text())
    assert [row[0] for row in page.cells[1:]] == [row["claim"] for row in data["rows"]]
    assert [(one["title"], list(one["lines"])) for one in page.charts] == [
        (one["title"], list(one["lines"])) for one in data["panels"]
    ]


def test_names_are_never_markup_and_long_runs_stay_small(tmp_path: Path) -> None:
    points = [(float(i), 0.01 + (i * 7919 % 1000) / 1000) for i in range(50_000)]
    chart = ReportChart(
        title=HOSTILE, x=HOSTILE, lines={HOSTILE: points, "<img src=x>": points}, unit="seconds", log_y=True
    )
    write_page(tmp_path / "page.html", HOSTILE, ["{{data}}"], [chart, chart])
    page = checked(tmp_path / "page.html")
    # A name in braces that a result holds is text, not a part of the template.
    assert page.text == ["{{data}}"]
    assert page.charts[0]["title"] == HOSTILE
    line = page.charts[0]["lines"][HOSTILE]
    assert MOST_POINTS / 2 < len(line) <= MOST_POINTS
    # The slowest and the fastest of all are among those drawn.
    assert {min(y for _, y in line), max(y for _, y in line)} == {0.01, max(y for _, y in points)}


def test_a_page_needs_no_matplotlib(scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = ["simulate", str(scenario), "--set", "run.window_s=9", "--jobs", "1"]
    assert main([*words, "--report", str(tmp_path / "p.html")]) == 0


@pytest.mark.parametrize(
    "words",
    [["simulate", "SCENARIO"], ["plan", str(ROOT / "examples" / "plan-chat-and-documents.yaml")],
     ["reproduce", "medha"], ["bench", "--trace", "none"]],
)  # fmt: skip
def test_a_folder_is_refused_before_the_work(
    words: list[str], scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(scenario) if word == "SCENARIO" else word for word in words]
    assert "it is a folder; name a file in it" in refusal([*given, "--report", str(tmp_path)], capsys)


@pytest.mark.skipif(missing_browser() is not None, reason=str(missing_browser()))
def test_a_browser_draws_it_from_the_file_at_two_widths(scenario: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    assert main(["compare", str(scenario), "--set", "run.window_s=9", "--jobs", "1", "--report", str(file)]) == 0
    with browser() as opened:
        for width in (1280, 400):
            opened.open(file.as_uri(), width)
            assert opened.wait("return document.querySelectorAll('canvas').length") == 2
            # Colours beside the axes' grey: something is drawn.
            drawn = (
                "const c = document.querySelector('canvas'); const p = c.getContext('2d')"
                ".getImageData(0, 0, c.width, c.height).data; let n = 0;"
                "for (let i = 0; i < p.length; i += 4) n += p[i + 2] > p[i] + 60 && p[i + 3] > 200; return n"
            )
            assert opened.run(drawn) > 50
            assert opened.run("return document.documentElement.scrollWidth") <= width
        assert opened.run("return document.querySelector('h1').textContent") == HOSTILE
        assert opened.complaints() == []
