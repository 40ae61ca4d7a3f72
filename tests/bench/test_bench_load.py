from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.bench.conftest import headway_bench
from tests.helpers.polling import until
from tests.helpers.report_pages import ReportPage

from headway.core.errors import ConfigError
from headway.serving.load.load import GoodputTargets
from headway.sim.metrics import SloTargets


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "t.csv"
    rows = [f"{i * 0.5},{9000 if i % 5 == 0 else 50 + i},{i % 3 + 2}" for i in range(20)]
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return file


def test_a_trace_is_replayed(serve_fake, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    url, file, page = serve_fake("--speed", "50000"), tmp_path / "o.json", tmp_path / "p.html"
    words = ("--url", url, "--trace", str(trace), "--slice", "5:", "--rate", "20", "--json", str(file))
    assert headway_bench(*words, "--goodput", "ttft:100", "long.ttft:5000", "--report", str(page)) == 0
    data = json.loads(file.read_text())
    assert data["schema"] == "headway.bench/1"
    assert [len(ReportPage(page).charts[0]["lines"][name]) for name in ("short", "long")] == [12, 3]
    assert data["workload"]["format"] == "headway"
    rows = data["requests"]
    assert [row["prompt_tokens"] for row in rows] == [9000 if i % 5 == 0 else 50 + i for i in range(5, 20)]
    assert [row["output_tokens"] for row in rows] == [i % 3 + 2 for i in range(5, 20)]
    assert rows[-1]["arrival_s"] == pytest.approx(14 / 20)
    assert {row["class"]: row["good"] for row in rows} == {"long": True, "short": True}
    classes = {one["class"]: one for one in data["summary"]["classes"]}
    assert (classes["short"]["requests"], classes["long"]["requests"]) == (12, 3)
    assert classes["long"]["ttft_s"]["p50"] > 0.17
    out = capsys.readouterr().out
    assert "long" in out
    assert "goodput" in out


@pytest.fixture
def untimed(tmp_path: Path) -> Path:
    """A trace without arrival times, of 100 requests."""
    file = tmp_path / "untimed.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n" + "10,2\n" * 100)
    return file


def test_times_that_a_trace_does_not_have_are_drawn_by_the_seed(  # type: ignore[no-untyped-def]
    serve_fake, untimed: Path, tmp_path: Path
) -> None:
    url, sent = serve_fake("--speed", "1e6", "--gap", "0"), []
    for seed in ("1", "1", "2"):
        file = tmp_path / "o.json"
        words = ("--url", url, "--trace", str(untimed), "--slice", "0:12", "--rate", "100", "--seed", seed)
        assert headway_bench(*words, "--json", str(file)) == 0
        sent.append([row["arrival_s"] for row in json.loads(file.read_text())["requests"]])
    assert sent[0] == sent[1] != sent[2]


def test_lost_requests_make_the_command_fail(  # type: ignore[no-untyped-def]
    serve_fake, untimed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve_fake("--mode", "refuse")
    assert headway_bench("--url", url, "--trace", str(untimed), "--slice", "0:6", "--rate", "100") == 1
    out = capsys.readouterr().out
    assert "3 of 6" in out
    assert "HTTP 429" in out


def test_ctrl_c_reports_finished_requests(serve_fake, untimed: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "o.json"
    code = "import sys; from tests.bench.conftest import headway_bench; sys.exit(headway_bench(*sys.argv[1:]))"
    url = serve_fake()
    words = ["--url", url, "--trace", str(untimed), "--rate", "5", "--json", str(file)]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
    )  # fmt: skip

    def some_are_answered() -> bool:
        with urllib.request.urlopen(f"{url}/requests", timeout=10) as seen:
            return len(json.load(seen)) >= 4

    until(some_are_answered)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 1
    data = json.loads(file.read_text())
    assert data["interrupted"]
    assert len(data["requests"]) == 100
    assert 0 < sum(row["error"] is None for row in data["requests"]) < 100


def test_goodput_targets_are_kept_by_class() -> None:
    goodput = GoodputTargets(["ttft:500", "long.ttft:30000", "tbt:100", "e2el:9000"])
    assert goodput.of("short") == SloTargets(ttft_s=0.5, tbt_s=0.1, e2e_s=9.0)
    assert goodput.of("long") == SloTargets(ttft_s=30.0, tbt_s=0.1, e2e_s=9.0)
    assert goodput.to_json()["long"] == {"ttft_s": 30.0}
    for wrong in ("ttft", "speed:3", "ttft:-1", "ttft:x", "ttft:nan"):
        with pytest.raises(ConfigError, match="METRIC"):
            GoodputTargets([wrong])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--trace", "none.csv"), "none.csv"),
        ((), "give a --trace FILE to replay"),
        (("--trace", "{untimed}"), "holds no arrival times: give a --rate"),
        (("--trace", "{untimed}", "--rate", "0"), "--rate is 0.0; it must be above 0"),
        (
            ("--trace", "{untimed}", "--rate", "1", "--slice", "200:"),
            "no request of untimed.csv is left after --slice 200:",
        ),
        (("--send-slo",), "--send-slo has nothing to send"),
    ],
)
def test_bad_settings_are_refused_with_an_explanation(untimed: Path, words: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        headway_bench("--url", "http://127.0.0.1:9", *(word.format(untimed=untimed) for word in words))


def test_goodput_of_a_class_that_no_request_can_have_is_refused(untimed: Path) -> None:
    words = ("--url", "http://127.0.0.1:9", "--trace", str(untimed), "--rate", "1")
    with pytest.raises(ConfigError, match="--goodput chat: the workload has no such class; it has long, short"):
        headway_bench(*words, "--goodput", "chat.ttft:100")
    # `long` may be drawn: what fails is the connection
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9"):
        headway_bench(*words, "--goodput", "long.ttft:100")


@pytest.mark.parametrize("words", [("--seed", "-1"), ("convoy", "--seed", "-1"), ("convoy", "--vocab-size", "1")])
def test_numbers_below_the_least_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        headway_bench(*words)
    assert f"argument {words[-2]}: {words[-1]!r} is not a whole number of at least" in capsys.readouterr().err


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import argparse, sys\nfrom headway.cli import demo\n"
        "from headway.serving.load import load\np = argparse.ArgumentParser()\n"
        "load.add_arguments(p)\ndemo.add_arguments(argparse.ArgumentParser())\np.format_help()\n"
        "print([n for n in ('aiohttp', 'matplotlib', 'torch', 'tokenizers') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
