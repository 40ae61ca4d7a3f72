"""vLLM's own scheduler tests, unchanged, against Headway's class: what passes, what fails and why.

    python scripts/vllm_own_tests.py .venv-vllm [--version 0.32.0] [--json FILE] [--only test_scheduler.py]

Takes `tests/v1/core` from vLLM's source distribution (45 MB; pip unpacks it before it finds that it cannot build it)
and runs them three times in an environment made by `make vllm`: with vLLM's own classes, since some tests need
models or packages that are not there; with Headway's and settings that limit nothing (first come, first served, steps
of any length), which shows the seams; and with Headway's as it comes, where chunks are sized by time. A test counts if
vLLM's own class passes it here.

The file is a plug-in of pytest too: it puts Headway's classes where the tests import vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

FILES = (
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_deferred_block_free.py",
    "test_priority_preemption_bug.py",
    "test_priority_scheduler_random.py",
    "test_prefix_replay.py",
    "test_prefix_caching.py",
    "test_swa_inflight_window_free.py",
    "test_worker_slot_overflow.py",
    "test_mamba_align_chunk_split.py",
)
"""Those that make a scheduler."""
MODES = ("stock", "unlimited", "default")
UNLIMITED = {
    "policy": "fcfs", "t_target_ms": 1e9, "newcomer_wait_ms": 1e9, "long_tokens": 1 << 40, "min_chunk": 1,
}  # fmt: skip
SETTINGS = "HEADWAY_OWN_TESTS_SETTINGS"
"""Environment variable with the settings of Headway's class, as JSON; unset: vLLM's own classes."""
OPT_125M = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "vocab_size": 50272,
    "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 65536, "word_embed_proj_dim": 768,
    "torch_dtype": "float16", "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
"""Shape of the model that most of these tests name; they need its configuration only."""


def pytest_configure(config: Any) -> None:
    """Hook of pytest: put Headway's classes in place of vLLM's before a test module imports them."""
    if SETTINGS not in os.environ:
        return
    import vllm.v1.core.sched.async_scheduler as asynchronous
    import vllm.v1.core.sched.scheduler as synchronous

    from headway.policy.hosted.settings import VllmSettings
    from headway.vllm import scheduler as plugged

    settings = json.loads(os.environ[SETTINGS])

    def with_settings(kind: Any) -> Any:
        class WithSettings(kind):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
                vllm_config.additional_config = {"headway": settings}
                super().__init__(vllm_config, *args, **kwargs)

        return WithSettings

    if settings == UNLIMITED:
        made = VllmSettings.scheduler_config
        # Nor is a block set aside for a prompt's first outputs: some of these tests fill the pool to the last block.
        VllmSettings.scheduler_config = lambda self, *limits: replace(made(self, *limits), reserve_tokens=0)

    synchronous.Scheduler = with_settings(plugged._SyncHeadwayScheduler)
    asynchronous.AsyncScheduler = with_settings(plugged._AsyncHeadwayScheduler)


class _Outcomes:
    """Plug-in that writes the outcome of each test, with the last line of a failure."""

    def __init__(self, path: str) -> None:
        self.path, self.found = path, {}  # type: str, dict[str, list[str]]

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("tests/v1/core/")[2] or report.nodeid
        if report.when == "call" or report.failed or report.skipped:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message.splitlines()[0] if crash is not None else str(report.longrepr or "")[:200]
            self.found.setdefault(name, [report.outcome, why])

    def pytest_sessionfinish(self) -> None:
        Path(self.path).write_text(json.dumps(self.found))


def source(version: str, scratch: Path) -> Path:
    """Return the folder of vLLM's source distribution, unpacked. Ends with a sentence where there is none."""
    command = [sys.executable, "-m", "pip", "download", "--no-clean", "--no-deps", "--no-binary", ":all:"]
    command += ["--no-build-isolation", "--dest", str(scratch), f"vllm=={version}"]
    done = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True, check=False
    )
    for tests in scratch.glob("*/*/tests/v1/core"):
        return tests.parents[2]
    raise SystemExit(f"pip finds no source distribution of vllm {version}: {(done.stderr or '').strip()[-300:]}")


def run(venv: Path, tests: Path, names: list[str], mode: str, folder: Path) -> dict[str, list[str]]:
    """Return (outcome, why) by test. A file that cannot be imported has one entry with its name."""
    out = folder / "outcomes.json"
    out.unlink(missing_ok=True)
    root = Path(__file__).resolve().parent.parent
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (root / "src", root / "scripts", tests))),
        "HF_HUB_OFFLINE": "1",
        "OWN_TESTS_OUTCOMES": str(out),
    }
    if mode != "stock":
        environment[SETTINGS] = json.dumps(UNLIMITED if mode == "unlimited" else {})
    code = (
        "import os, sys, pytest, vllm_own_tests as own;"
        "sys.exit(pytest.main(sys.argv[1:], plugins=[own, own._Outcomes(os.environ['OWN_TESTS_OUTCOMES'])]))"
    )
    command = [str(venv.resolve() / "bin" / "python"), "-c", code, "-q", "--noconftest", "-W", "ignore"]
    command += ["--timeout", "120", "-p", "no:cacheprovider", f"--rootdir={tests}"]
    command += [str(tests / "tests/v1/core" / name) for name in names]
    # The folder has a `facebook/opt-125m`, which a model's name is taken for.
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if not out.is_file():
        raise SystemExit(f"pytest ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return dict(json.loads(out.read_text()))


def make_model(venv: Path, folder: Path) -> None:
    """Write the model's configuration and a tokenizer of as many words; no weights."""
    model = folder / "facebook" / "opt-125m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(OPT_125M))
    code = (
        "import sys; from tokenizers import Tokenizer, models; from transformers import PreTrainedTokenizerFast as T;"
        "words = {f'w{i}': i for i in range(50265)};"
        "T(tokenizer_object=Tokenizer(models.WordLevel(words, 'w3')), eos_token='w2').save_pretrained(sys.argv[1])"
    )
    subprocess.run([str(venv / "bin" / "python"), "-c", code, str(model)], check=True, capture_output=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM's own scheduler tests against Headway's class.")
    parser.add_argument("venv", type=Path)
    parser.add_argument("--version", default="0.32.0")
    parser.add_argument("--source", type=Path, help="unpacked source distribution (default: from the package index)")
    parser.add_argument("--only", action="append", help="one file; may be repeated")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    names = a.only or list(FILES)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        # Beside the tests lies a `vllm` that is not built: only the tests may be on the path.
        tests = folder / "only"
        tests.mkdir()
        (tests / "tests").symlink_to((a.source or source(a.version, folder)).resolve() / "tests")
        make_model(a.venv, folder)
        found = {mode: run(a.venv, tests, names, mode, folder) for mode in MODES}
    for name in names:
        print(summary(name, found))
    if a.json is not None:
        a.json.write_text(json.dumps(found, indent=1))
    return 0


def summary(name: str, modes: dict[str, dict[str, list[str]]]) -> str:
    """Return the counts of one file, and each failure that is Headway's."""
    stock = {test: result for test, result in modes["stock"].items() if test.startswith(name)}
    able = [test for test, (outcome, _) in stock.items() if outcome == "passed"]
    lines = [f"{name}: {len(stock)} tests, vLLM's own class passes {len(able)} here"]
    for mode in MODES[1:]:
        failed = {test: modes[mode].get(test, ["missing", "not run"]) for test in able}
        failed = {test: result for test, result in failed.items() if result[0] != "passed"}
        lines.append(f"  {mode}: {len(able) - len(failed)} of {len(able)} pass")
        lines += [f"    {test}: {why[:160]}" for test, (_, why) in failed.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
