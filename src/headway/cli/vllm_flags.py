"""vLLM's `serve` flags on the native engine's command line: taken under the name they have here, taken where they ask
for what happens anyway, or refused in one line.

The names and their numbers of values are those of one vLLM version (`data/vllm_flags.json`, written by
`scripts/make_vllm_flags.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-n": "--nnodes",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--enable-prefix-caching": "--prefix-cache",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--max-num-queued-reqs": "--max-queued-requests",
    "--shutdown-timeout": "--drain-timeout-s",
    "--sse-keep-alive-interval": "--keep-alive-s",
}
"""Flags of vLLM that have another name here, in the same unit."""

INHERENT: dict[str, tuple[str, ...]] = {
    "--enable-chunked-prefill": (),
    "--enforce-eager": (),
    "--no-enable-log-outputs": (),
    "--no-enable-log-deltas": (),
    "--no-trust-request-chat-template": (),
    "--no-trust-remote-code": (),
    "--no-enable-prompt-embeds": (),
    "--no-enable-lora": (),
    "--no-enable-sleep-mode": (),
    "--no-enable-auto-tool-choice": (),
    "--no-enable-expert-parallel": (),
    "--disable-custom-all-reduce": (),
    "--disable-uvicorn-access-log": (),
    "--language-model-only": (),
    "--runner": ("auto", "generate"),
    "--convert": ("auto", "none"),
    "--tokenizer-mode": ("auto", "hf"),
    "--config-format": ("auto", "hf"),
    "--load-format": ("auto", "safetensors"),
    "--kv-cache-dtype": ("auto",),
    "--response-role": ("assistant",),
    "--chat-template-content-format": ("auto", "string"),
    "--data-parallel-size": ("1",),
    "-dp": ("1",),
    "--decode-context-parallel-size": ("1",),
    "-dcp": ("1",),
    "--prefill-context-parallel-size": ("1",),
    "-pcp": ("1",),
    "--api-server-count": ("1",),
    "-asc": ("1",),
    "--cpu-offload-gb": ("0",),
    "--stream-interval": ("1",),
}
"""Flags of vLLM that ask for what the native engine does in any case, with the values for which that is so; empty: the
flag stands alone."""

_ADVICE = {
    "--trust-remote-code": "no code of a checkpoint runs here: leave it out",
    "--gpu-memory-utilization": "say --kv-cache-memory SIZE; without it KV gets at most half of the free memory",
    "--device-memory-utilization": "say --kv-cache-memory SIZE; without it KV gets at most half of the free memory",
    "--num-gpu-blocks-override": "say how much memory KV gets with --kv-cache-memory SIZE",
    "--long-prefill-token-threshold": "chunks follow --t-target-ms here, or --chunking static:N",
    "--no-enable-chunked-prefill": "--chunking whole reads each prompt in one piece",
    "--tokenizer": "the tokenizer is read from the model's folder: put tokenizer.json there",
    "--seed": "requests give a `seed` of their own",
    "--master-addr": "say --ray-address HOST:PORT",
    "--master-port": "say --ray-address HOST:PORT",
    "--scheduler-cls": "choose an order with --scheduling-policy",
    "--ssl-keyfile": "put a proxy that does TLS in front",
    "--ssl-certfile": "put a proxy that does TLS in front",
    "--hf-token": "nothing is downloaded here: fetch the model with `hf download`",
    "--enable-log-requests": "each request has a log line here: leave it out",
    "--no-enable-log-requests": "--log-level warning leaves out the requests' log lines",
    "--data-parallel-size": "`headway cluster` runs several engines behind one address",
    "-dp": "`headway cluster` runs several engines behind one address",
    "--quantization": "checkpoints are served in float32 or bfloat16",
    "-q": "checkpoints are served in float32 or bfloat16",
    "--disable-log-stats": "--status-every-s 0 leaves out the status lines",
    "--max-num-scheduled-tokens": "say --max-num-batched-tokens",
}
"""What to do instead, for flags of which that can be said."""


@cache
def vllm_flags() -> tuple[str, dict[str, str]]:
    """Return the version of vLLM that the list is of, and its flags with their numbers of values as in argparse."""
    held = json.loads(files("headway.cli").joinpath("data", "vllm_flags.json").read_text("utf-8"))
    return held["version"], held["flags"]


def values_of(arity: str) -> int | str | None:
    """Return argparse's `nargs` for a number of values in the list."""
    return {"0": 0, "1": None}.get(arity, arity)


class _VllmFlag(argparse.Action):
    """A flag that only vLLM has: taken without effect where it asks for what happens anyway, else refused."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Called by argparse. Exits with status 2 and one line for a flag that has no meaning here."""
        assert option is not None
        given: Sequence[str] = [values] if isinstance(values, str) else values or []
        fitting = INHERENT.get(option)
        if fitting is not None and (not given if not fitting else all(each in fitting for each in given)):
            return
        shown = " ".join([option, *given])
        instead = _ADVICE.get(option, "leave it out")
        parser.error(f"{shown} is vLLM's and not the native engine's: {instead}, or use --engine vllm")


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags to the parser of `headway serve`, which has its own already. They are not shown in `--help`."""
    own = parser._option_string_actions
    for alias, flag in ALIASES.items():
        if alias not in own and flag in own:
            # The same action under another name: not a second entry in --help.
            own[alias] = own[flag]
    for flag, arity in vllm_flags()[1].items():
        if flag not in own:
            hidden: dict[str, Any] = {
                "nargs": values_of(arity),
                "default": argparse.SUPPRESS,
                "help": argparse.SUPPRESS,
            }
            parser.add_argument(flag, action=_VllmFlag, dest="vllm_flag", **hidden)
