"""Running a convoy against a server started for it, and reporting; shared by `bench convoy` and the demo."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.output_file import write_output
from headway.serving.load.client import TargetEndpoint
from headway.serving.load.convoy import ConvoyPlan, ConvoyRun, ConvoyRunner, PromptSource, alternate
from headway.serving.load.endpoint import first_model
from headway.serving.load.policies import PolicySpec
from headway.serving.load.server_process import SERVE, ServerProcess


@dataclass(frozen=True, kw_only=True)
class ServerUnderTest:
    """The server to start, without its policy."""

    model: str
    """Checkpoint folder."""
    max_model_len: int
    arguments: tuple[str, ...] = ()
    """Further arguments of the command."""
    command: tuple[str, ...] = SERVE
    api_key: str | None = None
    timeout_s: float | None = 3600.0
    """Limit of one request."""


def serve_and_measure(served: ServerUnderTest, spec: PolicySpec, plan: ConvoyPlan, prompts: PromptSource) -> ConvoyRun:
    """Start a server with a policy, run the plan against it, and end it. Errors quote the end of its output."""
    from headway.sim.report.tables import say

    say(f"[bold]{spec.label}[/bold]: starting a server")
    arguments = [
        served.model,
        "--max-model-len",
        str(served.max_model_len),
        *spec.server_arguments(),
        *served.arguments,
    ]
    with ServerProcess(arguments, command=served.command) as server:
        say(f"  ready after {server.start_s:.1f} s")
        entry = first_model(server.url, served.api_key)
        check_lengths(plan, entry.get("max_model_len"), server.url)
        endpoint = TargetEndpoint(
            base_url=server.url,
            model=str(entry["id"]),
            api_key=served.api_key,
            timeout_s=served.timeout_s,
        )
        return measure([endpoint], plan, prompts, [""], 0.0)[0]


def check_lengths(plan: ConvoyPlan, limit: object, url: str) -> None:
    """Raise ConfigError where the server at `url` allows fewer tokens (`limit`, if it says so) than a request needs."""
    lengths = (("long", plan.long_tokens, plan.long_output), ("short", plan.short_tokens, plan.short_output))
    for name, prompt, output in lengths:
        if isinstance(limit, int) and prompt + output > limit:
            raise ConfigError(
                f"--{name}-tokens {prompt} and --{name}-output {output} are {prompt + output} tokens, and {url} allows "
                f"{limit} a request: give at most --{name}-tokens {max(0, limit - output)}"
            )


def measure(
    endpoints: Sequence[TargetEndpoint], plan: ConvoyPlan, prompts: PromptSource, labels: Sequence[str], seconds: float
) -> list[ConvoyRun]:
    """Run the plan against an endpoint, or against several in turn for `seconds`, with progress on the terminal."""
    from headway.sim.report.tables import say

    def runner(endpoint: TargetEndpoint, label: str) -> ConvoyRunner:
        prefix = f"  {label}: " if len(endpoints) > 1 else "  "
        return ConvoyRunner(endpoint, plan, prompts, say=lambda line: say(prefix + line))

    runners = [runner(endpoint, label) for endpoint, label in zip(endpoints, labels, strict=True)]
    if len(runners) == 1:
        return [asyncio.run(runners[0].run())]
    return asyncio.run(alternate(runners, seconds))


def report(
    data: dict[str, Any], json_file: Path | None, plot_file: Path | None, titles: list[str] | None = None
) -> int:
    """Print the table of a convoy's JSON; write it and its picture where asked. Returns 1 if a short failed, else 0."""
    from headway.sim.report.tables import convoy_table, ratio_table, say, show

    show(convoy_table(data))
    if data["ratios"]:
        show(ratio_table(data))
    for run in data["runs"]:
        errors = [row["error"] for convoy in run["convoys"] for row in convoy["series"] if row["error"]]
        if errors:
            say(f"{run['policy']}: {len(errors)} of {run['short']['n']} shorts failed, the first with: {errors[0]}")
    if json_file is not None:
        write_output(json_file, json.dumps(data, indent=1).encode() + b"\n")
        say(f"wrote {json_file}")
    if plot_file is not None:
        from headway.sim.report.plots import convoy_figure, save

        for written in save(convoy_figure(data, titles), plot_file):
            say(f"wrote {written}")
    # A failed long prompt has raised ConvoyError before.
    return 1 if any(run["short"]["failed"] for run in data["runs"]) else 0
