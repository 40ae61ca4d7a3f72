"""`headway doctor --vllm [MODEL]`: whether Headway's plug-in fits a vLLM, and what the flags of a server mean for it.

Give MODEL and the flags of your `vllm serve`: they go on to vLLM, and no model is loaded. Whether a profile of this
engine is stored is said too. The exit status is 1 where the engine would not start. vLLM is that of this environment,
else `vllm` on PATH, or --vllm-command PATH; that environment must have Headway too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from headway.cli.doctor import MachineFinding, show, status_of
from headway.cli.profile_vllm import add_vllm_command, vllm_python
from headway.core.errors import ConfigError
from headway.perf.latency.table import default_path
from headway.vllm import adapter, plugin
from headway.vllm.latency import latency_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_vllm_command(parser)


def run(arguments: argparse.Namespace, passed: list[str]) -> int:
    """passed: the model and flags that are vLLM's."""
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
