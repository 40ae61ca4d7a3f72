"""`headway serve --engine`: which engine is taken, and the command line that vLLM is started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.hub import hub_cache

from headway.cli import vllm_engine
from headway.core.errors import ConfigError

FAKE = f"""#!{sys.executable}
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "key": os.environ.get("VLLM_API_KEY")}}))
sys.exit(7)
"""
OURS = ["--scheduler-cls", "headway.vllm.Scheduler", "--middleware", "headway.vllm.SloMiddleware"]


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A folder for PATH with a `vllm` that prints its arguments."""
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(FAKE)
    script.chmod(0o755)
    return script.parent


def line_of(*words: str, **config: Any) -> list[str]:
    line, _, _ = vllm_engine.vllm_line(words, config)
    return line


def headway(fake: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "VLLM_"))}
    environment |= {"PATH": f"{fake}:{environment['PATH']}"} | more
    return subprocess.run(
        [sys.executable, "-m", "headway.cli.main", "serve", *words], env=environment, capture_output=True, text=True
    )


def test_vllm_replaces_the_command_with_headway_s_scheduler_in_it(fake: Path) -> None:
    words = ["org/m", "--engine", "vllm", "--gpu-memory-utilization", "0.9", "-tp", "2", "--t-target-ms", "40"]
    done = headway(fake, *words, HEADWAY_API_KEY="secret", HEADWAY_VLLM_COMMAND="vllm")
    told = json.loads(done.stdout)
    assert (done.returncode, told["key"]) == (7, "secret")
    assert done.stderr == "headway: org/m is not all in the local hub cache: vLLM asks the hub for it\n"
    assert told["argv"][:6] == ["serve", "org/m", "--gpu-memory-utilization", "0.9", "-tp", "2"]
    assert told["argv"][6:] == [
        "--host", "127.0.0.1", *OURS, "--additional-config", '{"headway": {"t_target_ms": 40.0}}'
    ]  # fmt: skip


def test_a_dry_run_prints_the_command_without_the_key(fake: Path) -> None:
    done = headway(fake, "--dry-run", "m", "--engine=vllm", HEADWAY_API_KEY="secret", HEADWAY_VLLM_COMMAND="vllm")
    assert done.returncode == 0
    assert done.stdout == f"{fake}/vllm serve m --host 127.0.0.1 {' '.join(OURS)}\n"


def test_a_model_in_the_local_hub_cache_is_given_to_vllm_as_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_cache(tmp_path, "org/m")
    cache = ["--download-dir", str(tmp_path)]
    assert line_of("org/m", *cache)[1] == "org/m", "without a tokenizer and weights"
    (snapshot / "tokenizer.json").write_text("{}")
    shards = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(shards))
    (snapshot / "1.safetensors").write_bytes(b"")
    assert line_of("org/m", *cache)[1] == "org/m", "a part of the weights"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"^org/m is neither a folder nor .*: run `hf download org/m`, or give"):
        line_of("org/m", *cache)
    (snapshot / "2.safetensors").write_bytes(b"")
    assert line_of("org/m", *cache)[:4] == ["serve", str(snapshot), "--served-model-name", "org/m"]
    assert line_of("org/m", *cache, "--served-model-name", "x")[1:4] == [str(snapshot), *cache]


def test_flags_follow_the_environment_and_this_follows_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_PORT", "2")
    line = line_of("m", "--port", "3", port=1, enable_lora=True, served_model_name=["a", "b"], t_target_ms=30)
    assert [line[at + 1] for at, word in enumerate(line) if word == "--port"] == ["1", "2", "3"]
    assert line[line.index("--served-model-name") + 1 :][:2] == ["a", "b"]
    assert "--enable-lora" in line
    assert json.loads(line[-1]) == {"headway": {"t_target_ms": 30.0}}


def test_settings_of_the_policy_join_those_that_vllm_s_own_flag_gives() -> None:
    own = '{"x": 1, "headway": {"stretch": 0.2, "policy": "fcfs"}}'
    line = line_of(
        "m", "--additional-config", own, "--scheduling-policy", "edf", "--deadline-base-s", "2",
        "--latency-profile", "p.json", "--kv-cache-memory", "4G",
    )  # fmt: skip
    headway = {"stretch": 0.2, "policy": "edf", "deadline_base_ms": 2000.0, "profile": "p.json"}
    assert json.loads(line[-1]) == {"x": 1, "headway": headway}
    assert "--scheduling-policy" not in line
    assert line[line.index("--kv-cache-memory-bytes") + 1] == "4G"


def test_vllm_s_own_order_and_flags_of_later_versions_pass_on() -> None:
    line = line_of("m", "--scheduling-policy", "priority", "--some-new-flag", "3", "-cc.mode", "2")
    assert line[2:4] == ["--scheduling-policy", "priority"]
    assert line[4:8] == ["--some-new-flag", "3", "-cc.mode", "2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "--journal", "j"], "^--journal is the native engine's: leave it out, or use --engine native$"),
        ([], "^--engine vllm needs MODEL"),
        (["m", "--scheduler-cls", "x.Y"], "^--scheduler-cls: --engine vllm sets it"),
        (["m", "--host", "0.0.0.0"], "^refusing to listen on '0.0.0.0' without an API key"),
        (["m", "--additional-config", "[1]"], "--additional-config must be a JSON object"),
        (["m", "--t-target-ms", "soon"], "--t-target-ms: 'soon' is not a number"),
        (["m", "--useful-share", "2"], "useful_share: Input should be less than or equal to 1, not 2.0"),
        (["m", "--additional-config", '{"headway": {"t_target": 3}}'], "t_target: no such setting .settings: t_target"),
    ],
)
def test_what_vllm_cannot_be_started_with_is_one_sentence(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vllm_engine.vllm_line(words, {})


def test_an_unknown_engine_and_a_missing_vllm_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--engine must be native, vllm or auto, not 'torch'"):
        vllm_engine.take_over(["--engine", "torch"])
    with pytest.raises(ConfigError, match="--vllm-command /no/vllm: there is no such command"):
        vllm_engine.take_over(["--engine", "vllm", "--vllm-command", "/no/vllm"])
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no vLLM in this environment and no `vllm` on PATH"):
        vllm_engine.take_over(["m", "--engine", "vllm"])


@pytest.mark.parametrize(
    ("driver", "command", "taken", "why"),
    [
        (False, ["vllm"], None, r"native \(no GPU on this machine\)"),
        (True, None, None, r"native \(no vLLM in this environment or on PATH\)"),
        (True, ["/bin/vllm"], 0, r"vllm \(a GPU and vLLM are here\)"),
    ],
)
def test_auto_takes_vllm_where_there_is_a_gpu_and_says_why(
    driver: bool, command: list[str] | None, taken: int | None, why: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(vllm_engine, "has_driver", lambda: driver)
    monkeypatch.setattr(vllm_engine, "_vllm_command", lambda named: command)
    assert vllm_engine.take_over(["m", "--engine", "auto", "--dry-run"]) == taken
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert why.replace("\\", "") in shown


def test_auto_stays_native_beside_a_vllm_that_the_scheduler_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "has_driver", lambda: True)
    monkeypatch.setattr(vllm_engine, "version", lambda name: "0.99.1+cpu")
    reason = vllm_engine._why_native([sys.executable, "-m", "vllm"])
    assert (
        reason
        == "vLLM 0.99.1 is not one that Headway's scheduler knows: 0.28.0, 0.29.0, 0.30.0, 0.31.0, 0.32.0, 0.33.0"
    )


def test_a_vllm_whose_environment_lacks_headway_is_refused_before_it_starts(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    script = tmp_path / "vllm"
    script.write_text(f"#!{python}\n")
    for each in (python, script):
        each.chmod(0o755)
    with pytest.raises(ConfigError, match=r"has no Headway: run `.*/python3 -m pip install --no-deps headway` first"):
        vllm_engine._check_plugin([str(script)])
