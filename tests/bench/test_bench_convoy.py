from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.bench.conftest import headway_bench
from tests.helpers.polling import until
from tests.helpers.report_pages import ReportPage

from headway.core.errors import ConfigError, HeadwayError
from headway.serving.load.convoy import (
    PolicySpec,
    ServerError,
    ServerProcess,
    parse_policies,
)

SMALL = ("--long-tokens", "6000", "--short-interval", "0.1", "--short-output", "4", "--warmup", "2")


@pytest.mark.long
def test_a_convoy_per_policy(fake_command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "new" / "c.json", tmp_path / "c.html"
    words = ("--model", str(tmp_path), *SMALL, "--server-command", fake_command, "--policies", "lars,fcfs")
    assert headway_bench("convoy", *words, "--json", str(file), "--report", str(page)) == 0
    data = json.loads(file.read_text())
    assert data["schema"] == "headway.convoy/1"
    lars, fcfs = data["runs"]
    assert (lars["policy"], lars["chunking"], fcfs["policy"], fcfs["chunking"]) == ("lars", "adaptive", "fcfs", "whole")
    for run in (lars, fcfs):
        assert {"p50", "p90", "p99"} <= run["short"]["ttft_s"].keys()
        assert {"p50", "p90", "p99"} <= run["short"]["tbt_s"].keys()
        assert 4 <= run["short"]["n"] <= 6  # those sent before the long one's first token, after 0.6 s
        assert run["long"]["alone_s"] == pytest.approx(0.6, abs=0.15)
        assert run["long"]["ttft_s"]["p50"] == pytest.approx(0.6, abs=0.2)
        series = run["convoys"][0]["series"]
        assert [row["t_s"] for row in series] == pytest.approx([0.1 * (i + 1) for i in range(len(series))])
        assert all(row["t_s"] < run["convoys"][0]["long_ttft_s"] for row in series)
    assert lars["short"]["ttft_s"]["p50"] < 0.1 < fcfs["short"]["ttft_s"]["p50"]
    assert list(ReportPage(page).charts[0]["lines"]) == [run["policy"] for run in data["runs"]]
    assert str(tmp_path) not in file.read_text()
    assert "lars / adaptive" in capsys.readouterr().out


def test_against_a_running_server(serve_fake, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "c.json"
    url = serve_fake()
    assert headway_bench("convoy", "--url", url, *SMALL, "--repeat", "2", "--label", "other", "--json", str(file)) == 0
    (run,) = json.loads(file.read_text())["runs"]
    assert run["policy"] == "other"
    assert len(run["convoys"]) == 2
    assert run["short"]["n"] == sum(len(convoy["series"]) for convoy in run["convoys"])


@pytest.mark.long
def test_two_servers_are_measured_in_turn_and_compared(  # type: ignore[no-untyped-def]
    serve_fake, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file, page = tmp_path / "c.json", tmp_path / "c.html"
    # The fake has shorts wait for a long prompt that is computed whole.
    slow, fast = serve_fake("--chunking", "whole"), serve_fake("--chunking", "adaptive")
    words = ("--url", slow, "--url", fast, *SMALL, "--seconds", "3", "--json", str(file), "--report", str(page))
    assert headway_bench("convoy", *words) == 0
    data = json.loads(file.read_text())
    first, second = data["runs"]
    assert (first["policy"], second["policy"]) == (slow, fast)
    assert len(first["convoys"]) == len(second["convoys"]) >= 1
    (ratios,) = data["ratios"]
    assert ratios["ttft_p50"] == pytest.approx(second["short"]["ttft_s"]["p50"] / first["short"]["ttft_s"]["p50"])
    assert ratios["ttft_p50"] < 0.5
    assert first["long"]["alone_s"] is None
    assert list(ReportPage(page).charts[0]["lines"]) == [run["policy"] for run in data["runs"]]
    out = capsys.readouterr().out
    assert "times over those of" in out
    # Addresses are folded, not the figures.
    assert max(map(len, out.splitlines())) <= 80


def test_a_prompt_that_the_server_does_not_allow_is_refused_before_the_warm_up(  # type: ignore[no-untyped-def]
    serve_fake, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serve_fake("--max-model-len", "4096")
    with pytest.raises(ConfigError, match=f"are 6001 tokens, and {url} allows 4096 a request: give at most") as refused:
        headway_bench("convoy", "--url", url, *SMALL)
    assert "--long-tokens 4095" in str(refused.value)
    assert "warm-up" not in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--max-model-len allows 4096"):
        headway_bench("convoy", "--model", "x", *SMALL, "--max-model-len", "4096")


def test_labels_are_one_for_each_server(serve_fake) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="2 --url and 1 --label"):
        headway_bench("convoy", "--url", "http://a", "--url", "http://b", "--label", "stock")


def test_shorts_end_even_if_the_long_prompt_does_not(serve_fake, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "c.json"
    words = ("--url", serve_fake(), *SMALL, "--max-seconds", "0.25", "--json", str(file))
    assert headway_bench("convoy", *words) == 0
    (convoy,) = json.loads(file.read_text())["runs"][0]["convoys"]
    assert convoy["cut_short"]
    assert len(convoy["series"]) == 2


def test_a_server_that_cannot_start_is_quoted(fake_command: str, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"status 3 before it was ready(.|\n)*weights are missing"):
        headway_bench("convoy", "--model", str(tmp_path), "--server-command", f"{fake_command} --mode die")


def test_a_failing_long_prompt_ends_the_run_and_the_server(fake_command: str, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="worker lost"):
        headway_bench("convoy", "--model", str(tmp_path), "--server-command", f"{fake_command} --mode error-event")


def test_no_server_outlives_the_command(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    pid_name = str(tmp_path / "pid")
    script.write_text(f"import os, signal\nopen({pid_name!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n")
    words = ["bench", "convoy", "--model", "x", "--server-command", f"{sys.executable} {script}"]
    child = subprocess.Popen([sys.executable, "-m", "headway.cli.main", *words], stderr=subprocess.DEVNULL)
    pid_file = tmp_path / "pid"
    until(lambda: pid_file.exists() and pid_file.read_text())
    child.send_signal(signal.SIGTERM)
    child.wait(20)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.pause()\n")
    server = ServerProcess((), command=(sys.executable, str(script)), ready_s=0.5, grace_s=0.2)
    begun = time.monotonic()
    with pytest.raises(ServerError, match=r"not ready after 0\.5 s"):
        server.__enter__()
    assert time.monotonic() - begun < 5


def test_policies_are_parsed_and_wrong_ones_refused() -> None:
    assert parse_policies("lars, fcfs+static:512") == [PolicySpec("lars", "adaptive"), PolicySpec("fcfs", "static:512")]
    for wrong in ("lifo", "fcfs+static:0", "fcfs+chunks", "lars+"):
        with pytest.raises(ConfigError, match="allowed are"):
            parse_policies(wrong)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--url", "http://127.0.0.1:9"),
        ("--url", "nonsense"),
        ("--url", "nonsense", "--model", "x"),
        ("--model", "x", "--short-interval", "0"),
    ],
)
def test_bad_settings_are_refused_with_an_explanation(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        headway_bench("convoy", *words)
