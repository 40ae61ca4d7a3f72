"""`headway doctor --vllm` beside a small package in vLLM's place: version, seams, flags, settings, profile."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway.cli.main import main
from headway.perf.hardware import MODELS
from headway.perf.latency.table import MachineRates, default_path, roofline, save
from headway.vllm import adapter, plugin


class Scheduler:
    """vLLM's, with a method for each that the plug-in relies on."""


def seam(self: Any) -> None:
    """Source that no version of vLLM has."""


def make_arg_parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--scheduler-cls")
    parser.add_argument("--additional-config", type=json.loads, default={})
    for flag in ("--long-prefill-token-threshold", "--prefill-schedule-interval"):
        parser.add_argument(flag, type=int, default=0)
    return parser


class EngineArgs:
    """As much of vLLM's as is asked for."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given

    @classmethod
    def from_cli_args(cls, given: argparse.Namespace) -> EngineArgs:
        return cls(given)

    def create_engine_config(self) -> Any:
        given = self.given
        if given.model != "known":
            raise ValueError(f"Repo id must be a string: {given.model}")
        scheduler = SimpleNamespace(
            scheduler_cls=given.scheduler_cls, async_scheduling=True, max_num_seqs=8, max_num_batched_tokens=2048,
            long_prefill_token_threshold=given.long_prefill_token_threshold,
            prefill_schedule_interval=given.prefill_schedule_interval,
        )  # fmt: skip
        shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 512}
        model = SimpleNamespace(
            hf_text_config=SimpleNamespace(to_dict=lambda: shape), enforce_eager=True, dtype=SimpleNamespace(itemsize=4)
        )
        parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        return SimpleNamespace(
            scheduler_config=scheduler, model_config=model, parallel_config=parallel,
            additional_config=given.additional_config,
        )  # fmt: skip


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM 9.9.0, known, on a processor; a cache without profiles."""
    for name in plugin.SEAMS:
        monkeypatch.setattr(Scheduler, name, seam, raising=False)
    package = ModuleType("vllm")
    package.__spec__ = ModuleSpec("vllm", None, origin="a test")
    platform = SimpleNamespace(is_cpu=lambda: True)
    names: dict[str, dict[str, Any]] = {
        "v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "entrypoints.cli.serve": {"make_arg_parser": make_arg_parser},
        "utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
        "platforms": {"current_platform": platform},
    }
    monkeypatch.setitem(sys.modules, "vllm", package)
    vars(package).update(__version__="9.9.0+cpu", EngineArgs=EngineArgs)
    for name, held in names.items():
        module = ModuleType(f"vllm.{name}")
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    monkeypatch.setitem(plugin.KNOWN, "9.9.0", plugin.digests(Scheduler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "1000")


ON = ("known", "--scheduler-cls", "headway.vllm.Scheduler")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), ["✓ vLLM   9.9.0+cpu: the 8 methods that the plug-in relies on are those of 9.9.0", "- flags  none were"]),
        (("known",), ["- plug-in   these flags do not switch it on", "→ add --scheduler-cls headway.vllm.Scheduler"]),
        (ON, ["✓ plug-in   on; a step is scheduled while the one before runs", "✓ settings  policy ladder, time"]),
        (ON, ["- profile   none at ", "roofline of this processor", "→ headway profile --vllm MODEL FLAGS"]),
        ((*ON, "--long-prefill-token-threshold", "512"), ["! flags     --long-prefill-token-", "→ leave it"]),
        ((*ON, "--prefill-schedule-interval", "4"), ["✗ settings  the engine would not start: --prefill-schedule-"]),
        ((*ON, "--additional-config", '{"headway": {"tbt": 1}}'), ["✗ settings  the engine would not", "tbt is not a"]),
        ((*ON, "--additional-config", '{"headway": {"policy": "best"}}'), ["✗ ", "unknown scheduling policy 'best'"]),
        (("no-such",), ["✗ flags  cannot be read: Repo id must be a string: no-such"]),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("vllm")
def test_what_flags_mean_for_the_plug_in_is_said(
    words: tuple[str, ...], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--vllm", *words]) == any("✗" in each for each in said)
    shown = capsys.readouterr().out
    assert [each for each in said if each not in shown] == [], shown


@pytest.mark.usefixtures("vllm")
def test_a_stored_profile_of_the_engine_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineArgs(make_arg_parser(argparse.ArgumentParser()).parse_args(["--model", "known"]))
    mark = adapter.engine_facts(config.create_engine_config()).fingerprint
    rates = MachineRates(linear_flops=1e14, attention_flops=1e14, bandwidth=1e12)
    source = roofline(MODELS["llama-3-8b"], rates).source
    save(msgspec.structs.replace(source, fingerprint=mark), default_path(mark))
    assert main(["doctor", "--vllm", *ON]) == 0
    assert f"✓ profile   a stored profile, {source.provenance} ({default_path(mark)})" in capsys.readouterr().out


@pytest.mark.usefixtures("vllm")
def test_a_vllm_whose_methods_differ_or_that_cannot_be_imported_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Scheduler, "schedule")
    assert main(["doctor", "--vllm"]) == 1
    assert "✗ vLLM   Headway does not know the scheduler of vLLM 9.9.0+cpu" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.scheduler", None)
    assert main(["doctor", "--vllm"]) == 1
    assert "✗ vLLM  cannot be imported: " in capsys.readouterr().out


def test_without_a_vllm_one_sentence_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["doctor", "--vllm", "model"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("install vLLM here, or name one with --vllm-command")
