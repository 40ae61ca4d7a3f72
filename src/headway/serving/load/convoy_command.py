"""`headway bench convoy`: run the convoy on one server per policy, in sequence; report numbers and a picture."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError
from headway.core.output_file import check_outputs
from headway.serving.load.arguments import tokens, whole
from headway.serving.load.client import TargetEndpoint
from headway.serving.load.convoy import ConvoyPlan, PromptSource, random_prompts
from headway.serving.load.convoy_json import convoy_json
from headway.serving.load.endpoint import first_model
from headway.serving.load.policies import PolicySpec, parse_policies
from headway.serving.load.prompts import SAFE_VOCAB, vocab_size_of
from headway.serving.load.served import ServerUnderTest, check_lengths, measure, report, serve_and_measure
from headway.serving.load.server_process import SERVE
from headway.sim.report.plots import check_picture

LONG_TOKENS = 32768
"""Length of the long prompt, unless it is given or the server allows less."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `headway bench convoy`."""
    _add_servers(parser.add_argument_group("what to measure"))
    _add_load(parser.add_argument_group("the load"))
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (.png or .svg)")


def _add_servers(group: argparse._ArgumentGroup) -> None:
    """Add the options that select the servers."""
    add = group.add_argument
    add("--model", help="checkpoint folder to serve; with --url, the model name to ask for")
    add(
        "--url",
        action="append",
        help="measure the server that runs there instead of starting one per policy; several: in turn, with ratios",
    )
    help_text = "with several --url: start no further round of convoys that would end later (default %(default)s)"
    add("--seconds", type=float, default=120.0, help=help_text)
    add("--policies", default="ladder,fcfs", help="comma-separated POLICY or POLICY+CHUNKING (default %(default)s)")
    add("--max-model-len", type=tokens, help="for the servers (default: what the long prompt needs)")
    add("--server-args", default="", help="further arguments for `headway serve`, as one string")
    add("--server-command", help="start this instead of `headway serve`")
    add("--label", action="append", help="with --url: what to call it, one for each (default as-served, or the URLs)")
    add("--api-key", help="sent as a bearer token")


def _add_load(group: argparse._ArgumentGroup) -> None:
    """Add the options of the requests."""

    def add(flag: str, kind: Callable[[str], Any], default: float, text: str) -> None:
        group.add_argument(flag, type=kind, default=default, help=f"{text} (default %(default)s)")

    help_text = "length of the long prompt (default 32768; with --url at most what the server allows)"
    group.add_argument("--long-tokens", type=tokens, help=help_text)
    add("--long-output", tokens, 1, "tokens it is to generate")
    add("--short-tokens", tokens, 200, "length of a short prompt")
    add("--short-output", tokens, 16, "tokens a short generates")
    add("--short-interval", float, 1.0, "seconds between shorts")
    add("--warmup", int, 5, "shorts sent beforehand, then a long one")
    add("--repeat", int, 1, "convoys per server, pooled (several --url: --seconds)")
    add("--shared-prefix", int, 0, "tokens at the start that all prompts share; else no prefix cache helps")
    add("--max-seconds", float, 600.0, "send no shorts after that")
    help_text = "draw prompt ids below this (default: the checkpoint's, else 256)"
    group.add_argument("--vocab-size", type=whole(2), help=help_text)
    add("--seed", whole(0), 0, "decides every prompt")
    add("--timeout", float, 3600.0, "seconds for one request")


def run(args: argparse.Namespace) -> int:
    """Run the experiment; return 0 when every request was answered, 1 when a short was not."""
    check_outputs(args.json)
    check_picture(args.plot)
    if args.url:
        return _compare(args)
    plan = _plan(args, args.long_tokens or LONG_TOKENS)
    specs = parse_policies(args.policies)
    if not args.model:
        raise ConfigError("name a checkpoint folder with --model, or a running server with --url")
    # The longest request decides the servers' context, and so their KV pool.
    need = max(plan.long_tokens + plan.long_output, plan.short_tokens + plan.short_output)
    check_lengths(plan, args.max_model_len, "--max-model-len")
    server = ServerUnderTest(
        model=args.model,
        max_model_len=args.max_model_len or need,
        arguments=tuple(shlex.split(args.server_args)),
        command=tuple(shlex.split(args.server_command)) if args.server_command else SERVE,
        api_key=args.api_key,
        timeout_s=args.timeout,
    )
    results = [(spec, serve_and_measure(server, spec, plan, _prompts(args, plan))) for spec in specs]
    return report(convoy_json(Path(args.model).name, plan, results), args.json, args.plot)


def _plan(args: argparse.Namespace, long_tokens: int, alone: bool = True) -> ConvoyPlan:
    if args.repeat < 1 or args.warmup < 0:
        raise ConfigError("--repeat must be at least 1 and --warmup at least 0")
    if not args.short_interval > 0:
        raise ConfigError(f"--short-interval is {args.short_interval}; it must be above 0 seconds")
    return ConvoyPlan(
        long_tokens=long_tokens,
        long_output=args.long_output,
        short_tokens=args.short_tokens,
        short_output=args.short_output,
        short_interval_s=args.short_interval,
        warmup=args.warmup,
        repeat=args.repeat,
        max_s=args.max_seconds,
        shared_prefix=args.shared_prefix,
        alone=alone,
        seed=args.seed,
    )


def _prompts(args: argparse.Namespace, plan: ConvoyPlan) -> PromptSource:
    """Make random prompts within the model's vocabulary."""
    return random_prompts(plan, args.vocab_size or vocab_size_of(args.model) or SAFE_VOCAB)


def _compare(args: argparse.Namespace) -> int:
    """Measure the servers at `--url`, several in turn."""
    labels = args.label or (["as-served"] if len(args.url) == 1 else args.url)
    if len(labels) != len(args.url):
        raise ConfigError(f"{len(args.url)} --url and {len(labels)} --label: give one label for each")
    endpoints, limits = zip(*(_endpoint(args, url) for url in args.url), strict=True)
    most = min(limit for limit in (*limits, LONG_TOKENS + args.long_output) if limit)
    plan = _plan(args, args.long_tokens or most - args.long_output, alone=len(endpoints) == 1)
    for url, limit in zip(args.url, limits, strict=True):
        check_lengths(plan, limit, url)
    runs = measure(endpoints, plan, _prompts(args, plan), labels, args.seconds)
    specs = [PolicySpec(label, "as-served" if len(labels) == 1 else "") for label in labels]
    data = convoy_json(Path(args.model or "").name, plan, list(zip(specs, runs, strict=True)), len(runs) > 1)
    return report(data, args.json, args.plot, labels if len(labels) > 1 else None)


def _endpoint(args: argparse.Namespace, url: str) -> tuple[TargetEndpoint, int | None]:
    """Return a running server, and the tokens that it allows a request where it says so."""
    entry = first_model(url, args.api_key)
    # With --url, a folder in --model only tells the vocabulary; otherwise it is the name to send.
    named = args.model is not None and not Path(args.model).is_dir()
    model = args.model if named else str(entry["id"])
    limit = entry.get("max_model_len")
    endpoint = TargetEndpoint(base_url=url, model=model, api_key=args.api_key, timeout_s=args.timeout)
    return endpoint, limit if isinstance(limit, int) else None
