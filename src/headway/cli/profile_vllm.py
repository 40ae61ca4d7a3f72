"""`headway profile --vllm MODEL`: measure the steps of a vLLM engine on this machine, for its plug-in and simulations.

Give the flags of `vllm serve` that change its speed (--dtype, --enforce-eager, --max-num-batched-tokens, parallel
sizes): they go on to vLLM. Stored where the plug-in finds it when it serves this model in this way, or in --out. vLLM
is that of this environment, else `vllm` on PATH, or --vllm-command PATH; that environment must have Headway too.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from headway.core.errors import ConfigError
from headway.core.files import check_outputs, open_input
from headway.core.parse import duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace, passed: list[str]) -> int:
    """passed: flags that are vLLM's."""
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
