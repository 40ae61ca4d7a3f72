"""The command: output, errors, and operation without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentParser
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from headway.cli import serve
from headway.cli.main import NESTED, main

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked by the test")

BLOCKED = {"torch", "transformers", "safetensors", "tokenizers"}
sys.meta_path.insert(0, Blocker())
"""


def headway(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, and return what it printed."""
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    out, err = (TextIOWrapper(BytesIO(), encoding, write_through=True) for _ in range(2))
    with patch.dict(os.environ, environment), redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(list(words))
        except SystemExit as end:
            status = int(end.code or 0)
    printed = [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]
    return subprocess.CompletedProcess(words, status, *printed)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def without_torch(code: str) -> subprocess.CompletedProcess[str]:
    return python(BLOCKED + code)


@pytest.mark.parametrize("words", [("--help",), ()])
def test_help_names_every_command(words: tuple[str, ...]) -> None:
    done = headway(*words)
    assert done.returncode == 0
    for command in ("serve", "bench", "demo", "profile"):
        assert command in done.stdout


@pytest.mark.parametrize("command", sorted({command for command, _ in NESTED}))
def test_the_help_of_a_command_names_the_commands_under_it(command: str) -> None:
    said = headway(command, "--help", COLUMNS="400").stdout
    for words in (words for words in NESTED if words[0] == command):
        assert f"`{' '.join(words)}`" in " ".join(said.split())


@pytest.mark.parametrize("command", ["serve", "cluster"])
def test_the_help_of_a_server_is_a_line_a_flag_in_groups(command: str) -> None:
    done = headway(command, "--help", COLUMNS="80")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 80
    assert {"memory:", "scheduling:", "address and keys:"} <= set(lines)
    assert sum(line.startswith("  --port PORT ") for line in lines) == 1


def test_help_of_a_word_is_what_names_it_and_help_all_is_everything() -> None:
    named, everything = headway("serve", "--help", "ray").stdout, headway("serve", "--help", "all").stdout
    assert "--ray-address" in named
    assert "--port" not in named
    for words in ("--ray-address", "--port", "not needed for one host"):
        assert words in " ".join(everything.split())
    unknown = headway("serve", "--help", "no-such-word")
    assert unknown.returncode == 2
    assert "no flag has 'no-such-word' in its text" in unknown.stderr


def test_no_flag_of_serve_has_two_defaults() -> None:
    parser = ArgumentParser()
    serve.add_arguments(parser)
    assert [each.option_strings for each in parser._actions if (each.help or "").lower().count("default:") > 1] == []


def test_the_version_is_said() -> None:
    from headway import __version__

    assert headway("--version").stdout == f"headway {__version__}\n"


def test_print_config_shows_the_resolved_settings(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("max_num_seqs: 3\nnnodes: 4\nport: 1\n")
    done = headway(
        "serve", "--print-config", "--config", str(config), "--max-model-len", "128K", "--api-key", "hunter2",
        "--nnodes", "3", HEADWAY_MAX_NUM_SEQS="7", HEADWAY_NNODES="2",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    shown = yaml.safe_load(done.stdout)
    assert (shown["max_num_seqs"], shown["nnodes"], shown["port"]) == (7, 3, 1)
    assert (shown["max_model_len"], shown["chunking"]) == (131_072, "adaptive")
    assert "hunter2" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scheduling-policy", "lottery"], "unknown scheduling policy 'lottery': choose one of ladder, fcfs, edf"),
        (["--chunking", "static:none"], "unknown chunking 'static:none'"),
        (["--mode", "sloppy"], "mode must be 'default' or 'paper', not 'sloppy'"),
        (["--t-target-ms", "-1"], "--t-target-ms: must be at least 1, not -1"),
        (["--t-target-ms", "55s"], "--t-target-ms: must be at most 10000, not 55000"),
        (["--t-target-ms", "50us"], "--t-target-ms: must be at least 1, not 0.05"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1, not 0"),
        (["--max-model-len", "a lot"], "--max-model-len: 'a lot' is not a number of tokens"),
        (["/no/such/model"], "/no/such/model is not a folder"),
        (["--config", "/no/such.yaml"], "cannot read /no/such.yaml"),
        (["--tensor-parallel-size", "0"], "tensor-parallel-size must be at least 1, not 0"),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(words: list[str], message: str) -> None:
    done = headway("serve", *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("headway: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_unknown_command_gets_the_one_that_is_spelt_alike() -> None:
    done = headway("sevre")
    assert done.returncode == 2
    assert "did you mean serve?" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--qps", "1"), "unrecognized arguments: --qps 1 ("),
        (("--ratee", "1"), "unrecognized arguments: --ratee 1; --ratee: did you mean --rate?"),
        (("convoi",), "invalid choice: 'convoi'"),
    ],
)
def test_the_value_of_an_unknown_flag_is_not_taken_for_a_subcommand(words: tuple[str, ...], said: str) -> None:
    done = headway("bench", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_line_works_without_torch() -> None:
    done = without_torch(
        "from headway.cli.main import main\n"
        "for words in (['--help'], ['--version'], ['serve', '--help'], ['serve', '--print-config']):\n"
        "    try:\n        code = main(words)\n    except SystemExit as end:\n        code = end.code\n"
        "    assert not code\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [word in done.stdout for word in ("usage: headway ", "\nheadway ", "--port PORT", "port: 8000")] == [
        True
    ] * 4


def test_scheduling_works_without_torch_or_an_event_loop_and_the_engine_without_torch() -> None:
    done = without_torch(
        "import headway.policy.iteration.scheduler, headway.perf.latency.corrected\n"
        "assert 'zmq' not in sys.modules\n"
        "import headway.policy.iteration.scheduler, headway.kv.block_manager, headway.perf.latency.table\n"
        "import headway.runtime.engine.core\n"
        "import headway.runtime.engine.client, headway.perf.hardware, headway.sim.workload\n"
        "import headway.sim.metrics\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_print_config_can_be_fed_back_also_in_paper_mode(tmp_path: Path) -> None:
    first = headway("serve", "--print-config", "--mode", "paper", "--t-target-ms", "40")
    config = tmp_path / "c.yaml"
    config.write_text(first.stdout)
    shown = yaml.safe_load(first.stdout)
    assert (shown["t_target_ms"], shown["mode"], shown["scheduling_policy"]) == (40.0, "paper", "lars")
    assert headway("serve", "--print-config", "--config", str(config)).stdout == first.stdout


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (
            ("torch", "tokenizers", "jinja2", "fastapi", "uvicorn", "zmq", "prometheus_client", "aiohttp"),
            {"serve": "headway[serve]", "cluster x.yaml": "", "profile .": "", "bench --url http://localhost:1": ""},
        ),
        (
            ("headway_research",),
            dict.fromkeys(("reproduce --list", "profile fit a.csv --out b"), "this command is in headway_research"),
        ),
    ],
)
def test_an_install_without_a_part_names_in_one_line_what_a_command_needs(
    missing: tuple[str, ...], says: dict[str, str]
) -> None:
    done = python(
        f"import sys\nfor name in {missing!r}: sys.modules[name] = None\n"
        f"from headway.cli.main import main\nprint([main(words.split()) for words in {[*says]!r}])"
    )
    assert (done.returncode, done.stdout) == (0, f"{[2] * len(says)}\n")
    lines = done.stderr.splitlines()
    assert [words in line for words, line in zip(says.values(), lines, strict=True)] == [True] * len(says)
