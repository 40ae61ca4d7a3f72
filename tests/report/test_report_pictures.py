from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from matplotlib.text import Annotation
from rich.console import Console
from tests.cli.refusals import refusal
from tests.helpers.live_feeds import logged_events

from headway.cli.main import main
from headway.sim.metrics import RequestRecord, summarise
from headway.sim.report.page import ReportChart
from headway.sim.report.plots import (
    COLOURS,
    INK,
    convoy_figure,
    house_style,
    label_lines,
    line_colours,
    new_figure,
    save,
)
from headway.sim.report.tables import (
    LoadProgress,
    classes_sentence,
    classes_table,
    convoy_sentence,
    convoy_table,
    duration,
    error_table,
    rates_line,
    tick,
    tokens,
)
from headway_research.plot import draw


def run(policy: str, waits: list[float | None], long_s: float) -> dict:
    known = sorted(wait for wait in waits if wait is not None)
    median = known[len(known) // 2] if known else None
    cuts = dict.fromkeys(("p50", "p90", "p99", "max"), median)
    return {
        "policy": policy,
        "chunking": "whole",
        "short": {"ttft_s": cuts, "tbt_s": cuts, "n": len(waits), "failed": waits.count(None), "alone_ttft_s": 0.02},
        "long": {"ttft_s": {"p50": long_s}, "alone_s": None, "slowdown": None},
        "convoys": [{"long_ttft_s": long_s, "series": [{"t_s": float(i), "ttft_s": w} for i, w in enumerate(waits)]}],
    }


PLAN = {"long_tokens": 32768, "short_tokens": 200, "short_output": 16, "short_interval_s": 1.0}


def records() -> list[RequestRecord]:
    def one(i: int, **changes: object) -> RequestRecord:
        token_s = (i + 0.1, i + 0.2, i + 0.2)
        base: dict[str, object] = {"klass": "long" if i % 3 == 0 else "short", "token_s": token_s, "finish_s": i + 0.2}
        return RequestRecord(id=str(i), arrival_s=float(i), prompt_tokens=9, output_tokens=3, **{**base, **changes})

    return [one(0), one(1), one(2), one(3, error="HTTP 500: oh"), one(4, finish_s=None, token_s=())]


def text_of(thing: object) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(thing)
    return captured.get()


def test_the_convoy_picture_shows_the_median_waits(tmp_path: Path) -> None:
    data = {"plan": PLAN, "runs": [run("lars", [0.04, 0.05, None], 12.0), run("fcfs", [9.0, 8.0, 7.0], 11.0)]}
    figure = convoy_figure(data)
    words = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    (axes,) = figure.axes
    assert "lars\nmedian 50 ms\ndocument 12.0 s" in words
    assert "fcfs\nmedian 8.0 s\ndocument 11.0 s" in words
    assert "160× shorter" in words
    assert axes.get_title(loc="left") == "A chat waits 50 ms beside a 32.8K-token document,\nnot 8.0 s"
    assert axes.get_yscale() == "log"
    files = save(figure, tmp_path / "sub" / "convoy")
    assert [file.suffix for file in files] == [".png", ".svg"]
    assert all(file.stat().st_size > 5000 for file in files)
    first, second = (save(convoy_figure(data), tmp_path / f"{i}.svg")[0].read_bytes() for i in (1, 2))
    assert first == second
    for wide in (False, True):
        table = text_of(convoy_table(data, wide))
        assert "lars / whole" in table
        assert "32.8K-token prompt" in table
    assert "after 50 ms (lars), 8.0 s (fcfs): 160.0 times, median" in convoy_sentence(data)


def test_labels_of_lines_stand_apart_and_the_accent_is_headways(tmp_path: Path) -> None:
    names = ["fcfs", "ladder", "edf", "lars", "srpt", "lrs"]
    assert line_colours(names)[1] == COLOURS[0]
    assert len(set(line_colours(names))) == len(names)
    lines = {name: [(load, 5.0 + at / 100 * load) for load in (1.0, 2.0)] for at, name in enumerate(names)}
    with house_style():
        axes = new_figure(height_in=4.0).subplots()
        axes.set_ylim(0.0, 10.0)
        label_lines(axes, [(line[-1][1], name, INK) for name, line in lines.items()], 3.0)
    places = [float(text.xyann[1]) for text in axes.texts if isinstance(text, Annotation)]
    assert [text.get_text() for text in axes.texts] == names
    assert all(above - below > 0.05 for below, above in pairwise(places))
    panel = ReportChart(title="t", x="load", lines=lines, log_x=True, unit="seconds")
    assert draw([panel, panel], tmp_path / "lines.png", "found")[0].stat().st_size > 5_000


@pytest.mark.parametrize("waits", [[], [None]])
def test_a_convoy_without_answered_shorts_is_drawn(tmp_path: Path, waits: list[float | None]) -> None:
    save(convoy_figure({"plan": PLAN, "runs": [run("lars", waits, 0.5)]}), tmp_path / "c.png")


def test_load_tables() -> None:
    summary = summarise(records())
    body = summary.to_json()
    for wide in (False, True):
        table = text_of(classes_table(body, None, {"short"}, wide))
        assert "2 of 3" in table
        assert "100 ms" in table
        # Without an SLO there is no share that met it.
        assert [line.split()[4] for line in table.splitlines() if "of" in line.split()] == ["–", "66.7%", "60.0%"]
    assert "66.7% of short in their SLO" in classes_sentence(body, {"short"})
    assert "SLO" not in classes_sentence(body, ())
    assert "goodput" in rates_line(summary, judged=True)
    assert "goodput" not in rates_line(summary, judged=False)
    errors = text_of(error_table(records()))
    assert "HTTP 500" in errors
    assert "4: unfinished" in errors


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadProgress(2) as progress:
        progress.sent()
        progress.done(True)
    assert capsys.readouterr().err == ""


def test_durations_are_written_in_fitting_units() -> None:
    assert [duration(s) for s in (None, 0.0034, 0.0452, 0.9996, 7.91, 123.4)] == [
        "-",
        "3.4 ms",
        "45 ms",
        "1.0 s",
        "7.9 s",
        "123 s",
    ]
    assert [tokens(n) for n in (200, 9_999, 32_768, 1_000_000)] == ["200", "9,999", "32.8K", "1M"]
    assert [tick(s) for s in (0.03, 1.0)] == ["30 ms", "1 s"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_an_explanation_is_drawn_with_its_causes(tmp_path: Path, suffix: str) -> None:
    log, picture = tmp_path / "log", tmp_path / "made" / f"why{suffix}"
    log.write_bytes(b"\n".join(msgspec.json.encode(event) for event in logged_events(policy="fcfs")))
    assert main(["why", "r3", "--log", str(log), "--picture", str(picture)]) == 0
    assert picture.stat().st_size > 5_000


def test_a_picture_of_another_kind_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["why", "r3", "--log", "none", "--picture", str(tmp_path / "why.gif")]
    assert "its name must end in .png, .svg or .pdf" in refusal(words, capsys)
