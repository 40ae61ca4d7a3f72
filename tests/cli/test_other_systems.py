"""A base install on macOS and ARM: its modules are imported, and its commands run, without what Linux alone has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = """
import importlib, json, pkgutil
from headway.core.errors import SERVE_ONLY
import headway, headway_research
failed, extra = {}, []
for package in (headway, headway_research):
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None):
        try:
            importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in SERVE_ONLY | {"vllm"}:
                extra.append(info.name)
            else:
                failed[info.name] = repr(error)
        except Exception as error:
            failed[info.name] = repr(error)
print(json.dumps([failed, extra]))
"""
COMMANDS = """
from headway.cli.main import main
for words in {all_words!r}:
    print("status", main(words))
"""
BASE = ("api", "cli", "control", "core", "kv", "perf", "planning", "policy", "sim")
"""Packages that need nothing of the extra `serve`."""


def on_a_mac(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import tests.cli.mac_stub\n" + code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


def test_every_module_of_the_base_install_is_imported_without_what_linux_alone_has() -> None:
    done = on_a_mac(IMPORTS)
    assert done.returncode == 0, done.stderr
    failed, extra = json.loads(done.stdout)
    assert failed == {}
    assert [name for name in extra if name.startswith("headway_research") or name.split(".")[1] in BASE] == []
    # The stub stubs: an engine's modules are there, and need the extra.
    assert "headway.runtime.executor.worker" in extra


def test_commands_of_the_base_install_run_on_a_mac() -> None:
    shown = {
        "doctor --port 0": "Darwin",
        "simulate examples/chat-and-documents.yaml --set run.window_s=2 --jobs 1": "TTFT",
        "simulate examples/cluster-tetris.yaml --set workload.requests=20 --jobs 1": "TTFT",
        "reproduce medha.eq1": "medha.eq1",
        "accel stage": "serial",
    }
    done = on_a_mac(COMMANDS.format(all_words=[words.split() for words in shown]))
    assert (done.returncode, done.stderr) == (0, "")
    *screens, rest = done.stdout.split("status 0\n")
    assert rest == ""
    assert [shows in screen for screen, shows in zip(screens, shown.values(), strict=True)] == [True] * len(shown)


def test_a_command_that_computes_says_where_it_runs() -> None:
    commands = ["serve", "cluster", "demo", "profile"]
    done = on_a_mac(COMMANDS.format(all_words=[[command] for command in commands]))
    assert done.stdout == "status 2\n" * len(commands)
    assert done.stderr.splitlines() == [
        f"headway: error: `headway {command}` computes on Linux only; here run simulate, plan, reproduce, accel, "
        "trace, why, doctor and bench --url"
        for command in commands
    ]
