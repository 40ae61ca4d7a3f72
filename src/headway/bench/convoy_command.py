"""`headway bench convoy`: a server per policy, one after another, the convoy on each, numbers and a picture."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.bench.arguments import tokens
from headway.bench.convoy import (
    ConvoyPlan,
    ConvoyRun,
    ConvoyRunner,
    Prompts,
    random_prompts,
    shorts_failed,
)
from headway.bench.policies import PolicySpec, parse_policies
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.bench.client import Endpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `headway bench convoy`."""
    where = parser.add_argument_group("what to measure")
    where.add_argument(
        "--model",
        help="checkpoint folder to serve; with --url, the model name to ask for",
    )
    where.add_argument(
        "--url",
        help="measure the server that runs there instead of starting one per policy",
    )
    where.add_argument(
        "--policies",
        default="lars,fcfs",
        help="comma-separated POLICY or POLICY+CHUNKING (default %(default)s)",
    )
    where.add_argument(
        "--max-model-len",
        type=tokens,
        help="for the servers (default: what the long prompt needs)",
    )
    where.add_argument(
        "--server-args",
        default="",
        help="further arguments for `headway serve`, as one string",
    )
    where.add_argument("--server-command", help="start this instead of `headway serve`")
    where.add_argument("--api-key", help="sent as a bearer token")
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--long-tokens",
        type=tokens,
        default=32768,
        help="length of the long prompt (default %(default)s)",
    )
    load.add_argument(
        "--long-output",
        type=tokens,
        default=1,
        help="tokens it is to generate (default %(default)s)",
    )
    load.add_argument(
        "--short-tokens",
        type=tokens,
        default=200,
        help="length of a short prompt (default %(default)s)",
    )
    load.add_argument(
        "--short-output",
        type=tokens,
        default=16,
        help="tokens a short generates (default %(default)s)",
    )
    load.add_argument(
        "--short-interval",
        type=float,
        default=1.0,
        help="seconds between shorts (default %(default)s)",
    )
    load.add_argument(
        "--warmup",
        type=int,
        default=5,
        help="shorts sent beforehand, one by one (default %(default)s)",
    )
    load.add_argument(
        "--repeat",
        type=int,
        default=1,
        help="convoys per server, pooled (default %(default)s)",
    )
    load.add_argument(
        "--vocab-size",
        type=int,
        help="draw prompt ids below this (default: the checkpoint's, else 256)",
    )
    load.add_argument("--seed", type=int, default=0, help="decides every prompt (default %(default)s)")
    load.add_argument(
        "--timeout",
        type=float,
        default=3600.0,
        help="seconds for one request (default %(default)s)",
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.png or .svg)")


def run(args: argparse.Namespace) -> int:
    """Run it; 0 when every request was answered, 1 when a short was not."""
    from headway.report.console import say

    plan = _plan(args)
    if args.url:
        results = [(PolicySpec("as-served", "as-served"), _measure_url(args, plan))]
    else:
        if not args.model:
            raise ConfigError("name a checkpoint folder with --model, or a running server with --url")
        results = []
        for spec in parse_policies(args.policies):
            say(f"[bold]{spec.label}[/bold]: starting a server")
            results.append(
                (
                    spec,
                    serve_and_measure(
                        args,
                        plan,
                        spec,
                        args.model,
                        prompts_for(args, plan, args.model),
                    ),
                )
            )
    return report(args.model or "", plan, results, args.json, args.plot)


def _plan(args: argparse.Namespace) -> ConvoyPlan:
    for name, least in (
        ("long_tokens", 1),
        ("long_output", 1),
        ("short_tokens", 1),
        ("short_output", 1),
        ("repeat", 1),
        ("warmup", 0),
    ):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {least}")
    if not args.short_interval > 0:
        raise ConfigError(f"--short-interval is {args.short_interval}; it must be above 0 seconds")
    return ConvoyPlan(
        long_tokens=args.long_tokens,
        long_output=args.long_output,
        short_tokens=args.short_tokens,
        short_output=args.short_output,
        short_interval_s=args.short_interval,
        warmup=args.warmup,
        repeat=args.repeat,
        seed=args.seed,
    )


def prompts_for(args: argparse.Namespace, plan: ConvoyPlan, model: str | None) -> Prompts:
    """Random prompts within the model's vocabulary."""
    from headway.bench.prompts import SAFE_VOCAB, vocab_size_of

    return random_prompts(plan, args.vocab_size or vocab_size_of(model) or SAFE_VOCAB)


def _measure_url(args: argparse.Namespace, plan: ConvoyPlan) -> ConvoyRun:
    from headway.bench.client import Endpoint
    from headway.bench.endpoint import first_model

    listed = first_model(args.url, args.api_key) if args.model is None else {"id": args.model}
    endpoint = Endpoint(
        base_url=args.url,
        model=str(listed["id"]),
        api_key=args.api_key,
        timeout_s=args.timeout,
    )
    return measure(endpoint, plan, prompts_for(args, plan, args.model))


def serve_and_measure(
    args: argparse.Namespace,
    plan: ConvoyPlan,
    spec: PolicySpec,
    model: str,
    prompts: Prompts,
) -> ConvoyRun:
    """Start `headway serve` with this policy, measure, and end it. Errors carry the server's last words."""
    from headway.bench.client import Endpoint
    from headway.bench.endpoint import first_model
    from headway.bench.server_process import SERVE, ServerProcess
    from headway.report.console import say

    need = max(plan.long_tokens + plan.long_output, plan.short_tokens + plan.short_output)
    arguments = [
        model,
        "--max-model-len",
        str(args.max_model_len or need),
        *spec.server_arguments(),
    ]
    command = shlex.split(args.server_command) if args.server_command else SERVE
    with ServerProcess([*arguments, *shlex.split(args.server_args)], command=command) as server:
        say(f"  ready after {server.start_s:.1f} s")
        name = str(first_model(server.url, args.api_key)["id"])
        endpoint = Endpoint(
            base_url=server.url,
            model=name,
            api_key=args.api_key,
            timeout_s=args.timeout,
        )
        return measure(endpoint, plan, prompts)


def measure(endpoint: Endpoint, plan: ConvoyPlan, prompts: Prompts) -> ConvoyRun:
    """Run the plan against this endpoint, telling the terminal how it goes."""
    from headway.report.console import say

    return asyncio.run(ConvoyRunner(endpoint, plan, prompts, say=lambda line: say(f"  {line}")).run())


def report(
    model: str,
    plan: ConvoyPlan,
    results: list[tuple[PolicySpec, ConvoyRun]],
    json_file: Path | None,
    plot_file: Path | None,
) -> int:
    """Print the table; write JSON and picture where asked; the exit status."""
    from headway.bench.convoy_json import convoy_json
    from headway.report.console import show
    from headway.report.convoy_table import convoy_table

    data = convoy_json(Path(model).name, plan, results)
    show(convoy_table(data))
    write_outputs(data, json_file, plot_file)
    return 1 if shorts_failed([run for _, run in results]) else 0


def write_outputs(data: dict[str, Any], json_file: Path | None, plot_file: Path | None) -> None:
    """Write the JSON and the picture, making their folders."""
    from headway.report.console import say

    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(data, indent=1) + "\n")
        say(f"wrote {json_file}")
    if plot_file is not None:
        from headway.report.convoy_plot import convoy_figure
        from headway.report.style import save

        for written in save(convoy_figure(data), plot_file):
            say(f"wrote {written}")
