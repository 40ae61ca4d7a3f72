"""Commands about a vLLM on this machine: `headway profile --vllm` and `headway doctor --vllm`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headway.cli.doctor import MachineFinding, show, status_of
from headway.core.errors import ConfigError
from headway.core.files import check_outputs, open_input
from headway.core.parse import duration
from headway.perf.latency.table import default_path
from headway.vllm import adapter, plugin
from headway.vllm.latency import latency_model


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder of a Hugging Face checkpoint, or a hub id")
    parser.add_argument(
        "--budget", type=duration, default=60.0, metavar="SECONDS", help="measure for about so long (default: 60)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write it (default: the cache, where the plug-in looks)"
    )
    add_vllm_command(parser)


def add_vllm_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vllm-command", metavar="PATH", help="the `vllm` to ask (default: this environment's, else that on PATH)"
    )


def run_profile(arguments: argparse.Namespace, passed: list[str]) -> int:
    """`headway profile --vllm MODEL`: measure a vLLM engine's steps on this machine, for its plug-in and simulations.

    Give the flags of `vllm serve` that change its speed (--dtype, --enforce-eager, --max-num-batched-tokens, parallel
    sizes): they go on to vLLM. Stored where the plug-in finds it when it serves this model in this way, or in --out.
    vLLM is that of this environment, else `vllm` on PATH, or --vllm-command PATH; that environment must have Headway
    too.
    """
    # `passed`: flags that are vLLM's.
    if arguments.budget <= 0:
        raise ConfigError(f"--budget must be above 0 seconds, not {arguments.budget:g}")
    if arguments.model.startswith(("http://", "https://")):
        raise ConfigError(
            f"--vllm {arguments.model} is a server: its steps cannot be timed from outside, and others' requests would "
            "be among them; give the model and the flags that it is served with"
        )
    check_outputs(arguments.out)
    line = [
        vllm_python(arguments.vllm_command),
        "-m",
        "headway.vllm.step_profile",
        "--model",
        arguments.model,
        *passed,
    ]
    line += ["--headway-budget", str(arguments.budget)]
    if arguments.out is not None:
        line += ["--headway-out", str(arguments.out.absolute())]
    return subprocess.run(line, check=False).returncode


def vllm_python(named: str | None) -> str:
    """Return the interpreter of the environment of a `vllm`: the named one, else this environment's, else that on PATH.

    Raises ConfigError where there is none, and where its environment has no Headway: vLLM would report it after a
    minute.
    """
    # A folder of that name, such as a clone's, is no package: it has no origin.
    if named is None and (found := find_spec("vllm")) is not None and found.origin is not None:
        return sys.executable
    command = shutil.which(named or "vllm")
    if command is None:
        raise ConfigError(
            f"--vllm-command {named}: there is no such command"
            if named
            else "--vllm: there is no vLLM in this environment and no `vllm` on PATH: install vLLM here, or name one "
            "with --vllm-command"
        )
    with open_input(command) as script:
        first = script.readline(1000).decode("utf-8", "replace").strip()
    python = first.removeprefix("#!")
    if python == first or not Path(python).name.startswith("python"):
        raise ConfigError(f"{command} is not a Python script: name the `vllm` of an environment with --vllm-command")
    if subprocess.run([python, "-c", "import headway.vllm"], capture_output=True, check=False).returncode:
        raise ConfigError(
            f"the environment of {command} has no Headway: run `{python} -m pip install --no-deps ./headway` first, "
            "with Headway's repository in ./headway"
        )
    return python


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add_vllm_command(parser)


def run_doctor(arguments: argparse.Namespace, passed: list[str]) -> int:
    """`headway doctor --vllm [MODEL]`: whether Headway's plug-in fits a vLLM, and what a server's flags mean for it.

    Give MODEL and the flags of your `vllm serve`: they go on to vLLM, and no model is loaded. Whether a profile of this
    engine is stored is said too. The exit status is 1 where the engine would not start. vLLM is that of this
    environment, else `vllm` on PATH, or --vllm-command PATH; that environment must have Headway too.
    """
    # `passed`: the model and flags that are vLLM's.
    python = vllm_python(arguments.vllm_command)
    if python != sys.executable:
        return subprocess.run([python, "-m", "headway.cli.main", "doctor", "--vllm", *passed], check=False).returncode
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    found = list(findings(passed))
    show(found)
    return status_of(found)


def findings(words: Sequence[str]) -> Iterator[MachineFinding]:
    """Examine the vLLM of this environment. words: what would follow `vllm serve`; none: its version only."""
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
    except (ImportError, OSError) as error:
        yield MachineFinding("vLLM", "fault", f"cannot be imported: {error}", "install vLLM again")
        return
    try:
        report = plugin.compare(adapter.version(), plugin.digests(Scheduler))
        warning = plugin.require_known(report)
        same = f"{report.version}: the {len(plugin.SEAMS)} methods that the plug-in relies on are those of"
        yield MachineFinding("vLLM", "limited" if warning else "ok", warning or f"{same} {report.known_as}")
    except ConfigError as error:
        yield MachineFinding("vLLM", "fault", str(error))
    if not words:
        yield MachineFinding("flags", "absent", "none were given", "headway doctor --vllm MODEL FLAGS")
        return
    try:
        config = engine_config(words)
    except Exception as error:  # vLLM, transformers and pydantic have many kinds
        yield MachineFinding("flags", "fault", f"cannot be read: {str(error).strip() or type(error).__name__}")
        return
    yield from flag_findings(config)


def engine_config(words: Sequence[str]) -> Any:
    """Return the configuration that `vllm serve` would make of these words."""
    from vllm import EngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser  # where it is defined differs by version
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    given = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(list(words))
    given.model = given.model_tag or given.model
    return EngineArgs.from_cli_args(given).create_engine_config()


def flag_findings(config: Any) -> Iterator[MachineFinding]:
    """Yield what an engine's configuration means for the plug-in, and what its latency model starts from."""
    scheduler = config.scheduler_config
    if "headway" in str(scheduler.scheduler_cls):
        steps = "while the one before runs" if scheduler.async_scheduling else "after the one before has ended"
        yield MachineFinding("plug-in", "ok", f"on; a step is scheduled {steps}")
    else:
        advice = "add --scheduler-cls headway.vllm.Scheduler"
        yield MachineFinding("plug-in", "absent", "these flags do not switch it on", advice)
    threshold = scheduler.long_prefill_token_threshold
    if threshold:
        what = f"--long-prefill-token-threshold {threshold} cuts chunks below what the time allows"
        yield MachineFinding("flags", "limited", what, "leave it out")
    try:
        adapter.refuse_held_prefills(config)
        settings = adapter.settings_of(config)
        settings.scheduler_config(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, 1, 1)
        facts = adapter.engine_facts(config)
        start = latency_model(settings, facts)[1]
    except ConfigError as error:
        yield MachineFinding("settings", "fault", f"the engine would not start: {error}")
        return
    aim = "by the machine" if settings.t_target_ms is None else f"{settings.t_target_ms:g} ms"
    yield MachineFinding("settings", "ok", f"policy {settings.policy}, time between tokens {aim}")
    path = settings.profile or default_path(facts.fingerprint)
    if start.startswith("roofline"):
        what = f"none at {path}: the plug-in starts from a {start.rpartition(': no profile')[0]}"
        yield MachineFinding("profile", "absent", what, "headway profile --vllm MODEL FLAGS")
    else:
        yield MachineFinding("profile", "ok", f"{start} ({path})")
