"""`headway serve --engine vllm`: start `vllm serve` with Headway's scheduler and middleware in it.

The words of the command line go on to vLLM, in their order; settings of Headway's policy become `--additional-config`,
and a setting that only the native engine has is an error. Settings of `--config` and of HEADWAY_ variables become flags
before those of the command line, so that the precedence is that of the native engine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, get_args

from headway.cli.command_parser import CommandParser
from headway.cli.options import environment
from headway.cli.start_settings import EngineName, StartSettings
from headway.cli.vllm_flags import ALIASES, values_of, vllm_flags
from headway.core.dotted_path import is_dotted
from headway.core.errors import ConfigError
from headway.core.settings import flag_of, resolve, variable_of
from headway.core.strict_yaml import read_yaml
from headway.perf.hardware.device import has_driver
from headway.policy.hosted.settings import read_settings
from headway.serving.binding import check_binding
from headway.serving.model_folder import cached_checkpoint, is_hub_id, is_offline, not_cached
from headway.vllm.version_check import KNOWN

SCHEDULER, MIDDLEWARE = "headway.vllm.Scheduler", "headway.vllm.SloMiddleware"

_POLICY = {
    "t_target_ms": ("t_target_ms", 1.0),
    "long_tokens": ("long_tokens", 1),
    "min_chunk": ("min_chunk", 1),
    "least_gain": ("least_gain", 1.0),
    "useful_share": ("useful_share", 1.0),
    "stretch": ("stretch", 1.0),
    "rho_max": ("rho_max", 1.0),
    "deadline_base_s": ("deadline_base_ms", 1000.0),
    "deadline_factor": ("deadline_factor", 1.0),
    "admission_age_s": ("admission_age_s", 1.0),
}
"""Settings of the native engine that the plug-in has too: its name, and the factor between the units."""

_ORDERS = ("edf", "lrs", "srpt", "lars")
"""Values of --scheduling-policy that are Headway's; `fcfs` and `priority` are vLLM's."""

_BOTH = {
    flag: alias for alias, flag in ALIASES.items() if alias in ("--kv-cache-memory-bytes", "--max-num-queued-reqs")
}
"""Flags of the native engine by their name in vLLM, where the value reads the same in both."""


class _PassedFlag(argparse.Action):
    """Keep a flag of vLLM's and its values as they were given, in their order."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Called by argparse."""
        given = [values] if isinstance(values, str) else list(values or ())
        namespace.passed.append((str(option), given))


def take_over(words: Sequence[str]) -> int | None:
    """Start vLLM where it is the engine that the settings of `headway serve` name.

    words: those after `serve`. Returns the exit status of a dry run, and None where the native engine is to serve;
    does not return when vLLM is started. Raises ConfigError.
    """
    # -h and --help are the native engine's page, which describes --engine.
    if "-h" in words or "--help" in words:
        return None
    words, config, command = _without(words)
    engine = _engine(config, command)
    if engine == "native":
        return None
    vllm = _vllm_command(command.get("vllm_command") or config.get("vllm_command"))
    if engine == "auto":
        reason = _why_native(vllm)
        shown = "vllm (a GPU and vLLM are here)" if reason is None else f"native ({reason})"
        print(f"headway: engine: {shown}", file=sys.stderr)
        if reason is not None:
            return None
    if vllm is None:
        raise ConfigError(
            "--engine vllm: there is no vLLM in this environment and no `vllm` on PATH: install vLLM here, or name one "
            "with --vllm-command"
        )
    line, dry_run, api_key = vllm_line(words, config)
    if dry_run:
        print(shlex.join([*vllm, *line]))
        return 0
    _check_plugin(vllm)
    if is_hub_id(line[1]):
        print(f"headway: {line[1]} is not all in the local hub cache: vLLM asks the hub for it", file=sys.stderr)
    # A key in the environment stays out of the process list.
    variables = dict(os.environ) | ({"VLLM_API_KEY": api_key} if api_key else {})
    sys.stdout.flush()
    return _become([*vllm, *line], variables)


def _become(line: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Replace this process by the command, so that its signals and its exit status are vLLM's own."""
    os.execve(line[0], list(line), dict(variables))


def vllm_line(words: Sequence[str], config: Mapping[str, Any]) -> tuple[list[str], bool, str | None]:
    """Return the words after `vllm`, whether only to print them, and the API key of the environment.

    words: of the command line, without --engine and --config; config: content of the YAML file. Raises ConfigError.
    """
    variables = environment()
    parser = _parser()
    from_file = [word for key, value in config.items() for word in _as_flag(key, value)]
    named = {
        name: variables[variable_of(name)] for name in StartSettings.model_fields if variable_of(name) in variables
    }
    api_key = named.pop("api_key", None)
    from_variables = [word for name, value in named.items() if name not in _OWN for word in (flag_of(name), value)]
    given, unknown = parser.parse_known_args([*from_file, *from_variables, *words], argparse.Namespace(passed=[]))
    passed: list[tuple[str, list[str]]] = given.passed
    by_flag = dict(passed)
    model = given.model_tag or by_flag.get("--model", [""])[-1]
    if not model:
        raise ConfigError("--engine vllm needs MODEL: a folder or a hub id (the embedded model is the native engine's)")
    policy = _policy(given, passed)
    for flag, _ in passed:
        if flag == "--scheduler-cls":
            raise ConfigError("--scheduler-cls: --engine vllm sets it; run `vllm serve` for another scheduler")
    host = by_flag.get("--host", ["127.0.0.1"])[0]
    check_binding(
        host, api_key or variables.get("VLLM_API_KEY") or (by_flag.get("--api-key") or [""])[0], given.allow_public
    )
    # The last value of a flag counts; --middleware and --additional-config are ours to merge.
    revision, download_dir = (by_flag.get(flag, [""])[-1] or None for flag in ("--revision", "--download-dir"))
    # vLLM asks the hub for files that it has, for minutes where there is no network: it gets their folder.
    folder = cached_checkpoint(model, revision, download_dir)
    if folder is None and is_offline() and is_hub_id(model):
        raise not_cached(model, revision)
    line = ["serve", folder or model]
    if folder is not None and "--served-model-name" not in by_flag:
        line += ["--served-model-name", model]
    for flag, values in passed:
        if flag not in ("--model", "--additional-config"):
            line += [flag, *values]
    line += unknown
    if "--host" not in by_flag and "--uds" not in by_flag:
        line += ["--host", host]
    line += ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
    more = _additional(by_flag.get("--additional-config"), policy)
    # vLLM would report a wrong value after a minute.
    read_settings(more)
    return line + (["--additional-config", json.dumps(more)] if more else []), given.dry_run, api_key


_OWN = ("engine", "vllm_command")


def _parser() -> CommandParser:
    """Return a parser that knows vLLM's flags, and those of the native engine that have another name there or none."""
    parser = CommandParser(prog="headway serve --engine vllm", add_help=False)
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--dry-run", "--print-config", action="store_true")
    parser.add_argument("--allow-public", action="store_true")
    flags = vllm_flags()[1]
    for flag, arity in flags.items():
        parser.add_argument(flag, nargs=values_of(arity), action=_PassedFlag, dest="passed")
    for name in StartSettings.model_fields:
        flag = flag_of(name)
        if flag not in flags and name not in _OWN:
            parser.add_argument(flag, nargs="?", const="true", dest=name, default=argparse.SUPPRESS)
    return parser


def _policy(given: argparse.Namespace, passed: list[tuple[str, list[str]]]) -> dict[str, Any]:
    """Return the plug-in's settings, and move what has another name in vLLM to `passed`. Raises ConfigError."""
    known = {name: str(value) for name, value in vars(given).items() if name in StartSettings.model_fields}
    policy: dict[str, Any] = {}
    for name in list(known):
        flag = flag_of(name)
        if flag in _BOTH:
            passed.append((_BOTH[flag], [known.pop(name)]))
        elif name not in _POLICY and name != "latency_profile":
            raise ConfigError(f"{flag} is the native engine's: leave it out, or use --engine native")
    settings = resolve(StartSettings, flags=known)
    for name in settings.model_fields_set & _POLICY.keys():
        theirs, factor = _POLICY[name]
        policy[theirs] = getattr(settings, name) * factor
    if "latency_profile" in known:
        policy["profile"] = known["latency_profile"]
    for flag, values in [each for each in passed if each[0] == "--scheduling-policy" and _is_order(each[1][0])]:
        policy["policy"] = values[0]
        passed.remove((flag, values))
    return dict(sorted(policy.items()))


def _is_order(name: str) -> bool:
    """Return whether a value of --scheduling-policy is Headway's: by name, or a class by its path."""
    return name in _ORDERS or is_dotted(name)


def _additional(given: list[str] | None, policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's additional config with the plug-in's settings in it. Raises ConfigError where it is no object."""
    try:
        config = json.loads(given[-1]) if given else {}
        return {**config, **({"headway": {**config.get("headway", {}), **policy}} if policy else {})}
    except (ValueError, AttributeError, TypeError):
        raise ConfigError('--additional-config must be a JSON object, with an object under "headway" if any') from None


def _without(words: Sequence[str]) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    """Return the words without those that say which engine and which file of settings, the file, and those values."""
    first = CommandParser(prog="headway serve", add_help=False)
    for name in _OWN:
        first.add_argument(flag_of(name), dest=name, default=argparse.SUPPRESS)
    first.add_argument("--config", dest="config", default=argparse.SUPPRESS)
    own, rest = first.parse_known_args(list(words))
    named = {name: str(value) for name, value in vars(own).items()}
    config = read_yaml(named.pop("config")) if "config" in named else {}
    return rest, {str(key).replace("-", "_"): value for key, value in config.items()}, named


def _engine(config: Mapping[str, Any], command: Mapping[str, str]) -> str:
    engine = command.get("engine") or environment().get("HEADWAY_ENGINE") or config.get("engine") or "native"
    if engine not in get_args(EngineName):
        raise ConfigError(f"--engine must be native, vllm or auto, not {engine!r}")
    return str(engine)


def _as_flag(key: str, value: Any) -> list[str]:
    """Return a setting of a YAML file as words of a command line."""
    if key in _OWN or value is None or value is False:
        return [] if key in _OWN or value is None else [flag_of(f"no_{key}")]
    if value is True:
        return [flag_of(key)]
    if isinstance(value, list):
        return [flag_of(key), *map(str, value)]
    return [flag_of(key), json.dumps(value) if isinstance(value, dict) else str(value)]


def _vllm_command(named: str | None) -> list[str] | None:
    """Return the words that start vLLM: the named command, else this environment's vLLM, else the one on PATH."""
    named = named or environment().get("HEADWAY_VLLM_COMMAND")
    if named:
        found = shutil.which(named)
        if found is None:
            raise ConfigError(f"--vllm-command {named}: there is no such command")
        return [found]
    if find_spec("vllm") is not None:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    found = shutil.which("vllm")
    return None if found is None else [found]


def _why_native(vllm: list[str] | None) -> str | None:
    """Return why `auto` takes the native engine; None: it takes vLLM."""
    if not has_driver():
        return "no GPU on this machine"
    if vllm is None:
        return "no vLLM in this environment or on PATH"
    # The version of a command of another environment shows when its engine starts.
    if vllm[0] == sys.executable:
        try:
            installed = version("vllm").partition("+")[0]
        except PackageNotFoundError:
            installed = "of unknown version"
        if installed not in KNOWN:
            return f"vLLM {installed} is not one that Headway's scheduler knows: {', '.join(KNOWN)}"
    return None


def vllm_python(named: str | None) -> str:
    """Return the interpreter of the environment whose vLLM `serve` would start. Raises ConfigError."""
    vllm = _vllm_command(named)
    if vllm is None:
        raise ConfigError(
            "--vllm: there is no vLLM in this environment and no `vllm` on PATH: install vLLM here, or name one with "
            "--vllm-command"
        )
    python = _interpreter(vllm)
    if python is None:
        raise ConfigError(f"{vllm[0]} is not a Python script: name the `vllm` of an environment with --vllm-command")
    _check_plugin(vllm)
    return python


def _interpreter(vllm: Sequence[str]) -> str | None:
    """Return the Python that runs a `vllm` command; None: it is no script of Python's."""
    if vllm[0] == sys.executable:
        return sys.executable
    try:
        with Path(vllm[0]).open("rb") as script:
            first = script.readline(1000).decode("utf-8", "replace").strip()
    except OSError:
        return None
    python = first.removeprefix("#!")
    return None if python == first or not Path(python).name.startswith("python") else python


def _check_plugin(vllm: Sequence[str]) -> None:
    """Raise ConfigError when the Python of a `vllm` script lacks Headway: vLLM would report it after a minute."""
    python = _interpreter(vllm)
    # Other kinds of scripts are not looked into.
    if python is None or vllm[0] == sys.executable:
        return
    found = subprocess.run([python, "-c", "import headway.vllm"], capture_output=True, check=False)
    if found.returncode:
        raise ConfigError(
            f"the environment of {vllm[0]} has no Headway: run `{python} -m pip install --no-deps headway` first"
        )
