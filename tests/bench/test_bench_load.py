from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.helpers.polling import until

from headway.core.errors import ConfigError
from headway.serving.load import command
from headway.serving.load.goodput import GoodputTargets
from headway.sim.metrics import SloTargets


def headway_bench(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    before = signal.getsignal(signal.SIGTERM)
    try:
        return command.run(parser.parse_args(words))
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "t.csv"
    rows = [f"{i * 0.5},{9000 if i % 5 == 0 else 50 + i},{i % 3 + 2}" for i in range(20)]
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return file


def test_a_trace_is_replayed(serve_fake, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    url, file = serve_fake("--speed", "50000"), tmp_path / "o.json"
    words = ("--url", url, "--trace", str(trace), "--slice", "5:", "--rate", "20", "--json", str(file))
    assert headway_bench(*words, "--goodput", "ttft:100", "long.ttft:5000", "--plot", str(tmp_path / "p.svg")) == 0
    data = json.loads(file.read_text())
    assert data["schema"] == "headway.bench/1"
    assert data["workload"]["format"] == "headway"
    rows = data["requests"]
    assert [row["prompt_tokens"] for row in rows] == [9000 if i % 5 == 0 else 50 + i for i in range(5, 20)]
    assert [row["output_tokens"] for row in rows] == [i % 3 + 2 for i in range(5, 20)]
    assert rows[-1]["arrival_s"] == pytest.approx(14 / 20)
    assert {row["class"]: row["good"] for row in rows} == {"long": True, "short": True}
    classes = {one["class"]: one for one in data["summary"]["classes"]}
    assert (classes["short"]["requests"], classes["long"]["requests"]) == (12, 3)
    assert classes["long"]["ttft_s"]["p50"] > 0.17
    assert data["vllm"]["completed"] == 15
    assert data["vllm"]["median_ttft_ms"] == pytest.approx(data["summary"]["total"]["ttft_s"]["p50"] * 1000)
    out = capsys.readouterr().out
    assert "long" in out
    assert "goodput" in out
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


def test_the_same_seed_sends_the_same_requests(serve_fake, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    url, asked = serve_fake("--speed", "1e6", "--gap", "0"), []
    for seed in ("1", "1", "2"):
        file = tmp_path / "o.json"
        words = (
            "--url",
            url,
            "--input",
            "uniform:10-90",
            "--output",
            "fixed:2",
            "--rate",
            "100",
            "--num-requests",
            "12",
        )
        assert headway_bench(*words, "--seed", seed, "--arrivals", "gamma", "--json", str(file)) == 0
        asked.append([(r["arrival_s"], r["prompt_tokens"]) for r in json.loads(file.read_text())["requests"]])
    assert asked[0] == asked[1] != asked[2]


def test_lost_requests_make_the_command_fail(serve_fake, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    url = serve_fake("--mode", "refuse")
    words = (
        "--url",
        url,
        "--input",
        "10",
        "--output",
        "2",
        "--rate",
        "100",
        "--num-requests",
        "6",
        "--arrivals",
        "constant",
    )
    assert headway_bench(*words) == 1
    out = capsys.readouterr().out
    assert "3 of 6" in out
    assert "HTTP 429" in out


def test_sessions_share_cached_prefixes(serve_fake, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import urllib.request

    file = tmp_path / "a.csv"
    file.write_text("conv,t_s,input_tokens,output_tokens,cached_prefix_tokens\n1,0,64,2,0\n1,1,96,2,64\n2,0,80,0,0\n")
    url = serve_fake()
    words = ("--url", url, "--trace", f"{file}:agents", "--session-rate", "50", "--rescale", "0.1", "--share-prefixes")
    assert headway_bench(*words) == 0
    with urllib.request.urlopen(f"{url}/requests") as response:
        heads = [request["head"] for request in sorted(json.load(response), key=lambda one: one["tokens"])]
    assert heads[0] == heads[2] != heads[1]


def test_a_slice_of_a_real_trace(serve_fake, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    import os

    shared = Path(os.environ.get("HEADWAY_SHARED") or Path(__file__).resolve().parents[3] / "shared")
    real = shared / "data/traces/azure-llm-2023/AzureLLMInferenceTrace_conv.csv.gz"
    if not real.exists():
        pytest.skip("no real traces on this machine")
    file = tmp_path / "o.json"
    words = (
        "--url",
        serve_fake("--speed", "1e6", "--gap", "0"),
        "--trace",
        str(real),
        "--slice",
        "60s:70s",
        "--rate",
        "60",
    )
    assert headway_bench(*words, "--max-output-tokens", "5", "--json", str(file)) == 0
    assert len(json.loads(file.read_text())["requests"]) > 20


def test_ctrl_c_reports_finished_requests(serve_fake, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "o.json"
    code = (
        "import argparse, sys\nfrom headway.serving.load import command\np = argparse.ArgumentParser()\n"
        "command.add_arguments(p)\nsys.exit(command.run(p.parse_args(sys.argv[1:])))\n"
    )
    url = serve_fake()
    words = [
        "--url",
        url,
        "--input",
        "10",
        "--output",
        "2",
        "--rate",
        "5",
        "--arrivals",
        "constant",
        "--json",
        str(file),
    ]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
    )

    def some_are_answered() -> bool:
        with urllib.request.urlopen(f"{url}/requests", timeout=10) as seen:
            return len(json.load(seen)) >= 4

    until(some_are_answered)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 1
    data = json.loads(file.read_text())
    assert data["interrupted"]
    assert len(data["requests"]) == 100
    assert 0 < data["vllm"]["completed"] < 100


def test_goodput_targets_are_kept_by_class() -> None:
    goodput = GoodputTargets(["ttft:500", "long.ttft:30000", "tbt:100", "e2el:9000"])
    assert goodput.of("short") == SloTargets(ttft_s=0.5, tbt_s=0.1, e2e_s=9.0)
    assert goodput.of("long") == SloTargets(ttft_s=30.0, tbt_s=0.1, e2e_s=9.0)
    assert goodput.to_json()["long"] == {"ttft_s": 30.0}
    for wrong in ("ttft", "speed:3", "ttft:-1", "ttft:x", "ttft:nan"):
        with pytest.raises(ConfigError, match="METRIC"):
            GoodputTargets([wrong])


@pytest.mark.parametrize(
    "words",
    [
        ("--trace", "none.csv"),
        ("--rate", "0"),
        ("--arrivals", "trace"),
        ("--preset", "nothing"),
        ("--send-slo",),
        ("--input", "zipf:3"),
        ("--trace", "x", "--preset", "medha-mix"),
    ],
)
def test_bad_settings_are_refused_with_an_explanation(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        headway_bench("--url", "http://127.0.0.1:9", *words)


def test_goodput_of_a_class_that_no_request_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="--goodput chat: the workload has no such class; it has long, short"):
        headway_bench("--url", "http://127.0.0.1:9", "--goodput", "chat.ttft:100")
    # `long` may be drawn: what fails is the connection
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9"):
        headway_bench("--url", "http://127.0.0.1:9", "--goodput", "long.ttft:100", "--num-requests", "1")


@pytest.mark.parametrize("words", [("--seed", "-1"), ("--vocab-size", "1"), ("--vocab-size", "0")])
@pytest.mark.parametrize("subcommand", [(), ("convoy",)])
def test_numbers_below_the_least_are_refused(
    words: tuple[str, ...], subcommand: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        headway_bench(*subcommand, *words)
    assert f"argument {words[0]}: {words[1]!r} is not a whole number of at least" in capsys.readouterr().err


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import argparse, sys\nfrom headway.cli import demo\n"
        "from headway.serving.load import command\np = argparse.ArgumentParser()\n"
        "command.add_arguments(p)\ndemo.add_arguments(argparse.ArgumentParser())\np.format_help()\n"
        "print([n for n in ('aiohttp', 'matplotlib', 'torch', 'tokenizers') if n in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
