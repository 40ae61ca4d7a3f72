"""`headway prepare FILE`: have a running server compute a document's KV ahead, and print the id to ask about it."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from typing import Any

from headway.core.errors import ConfigError
from headway.core.files import read_input
from headway.core.parse import duration

_POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="text of the document; '-' reads standard input")
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="server: `headway serve` (default: http://127.0.0.1:8000)",
    )
    parser.add_argument("--model", metavar="NAME", help="name that the server calls the model by (default: its first)")
    parser.add_argument(
        "--api-key", metavar="KEY", help="the server's API key; only requests with it find the document"
    )
    parser.add_argument(
        "--ttl",
        type=duration,
        default=86_400.0,
        metavar="SECONDS",
        help="how long the server keeps it (default: 86400, a day)",
    )
    parser.add_argument(
        "--cache-salt", metavar="SALT", help="only requests with this cache_salt, or with the document's id, use it"
    )
    parser.add_argument(
        "--as",
        dest="kind",
        choices=("system", "user", "prompt"),
        default="system",
        help="role of the message in which chats have the document; or prompt: text that completions continue "
        "(default: system)",
    )


def run(arguments: argparse.Namespace) -> int:
    from headway.serving.load.client import ask, first_model, server_root
    from headway.sim.report.tables import StepBar

    root = server_root(arguments.url)
    model = arguments.model or first_model(root, arguments.api_key)["id"]
    body: dict[str, Any] = {"model": model, "ttl": arguments.ttl, "cache_salt": arguments.cache_salt}
    text = _text(arguments.file)
    if arguments.kind == "prompt":
        body["prompt"] = text
    else:
        body["messages"] = [{"role": arguments.kind, "content": text}]
    contexts = f"{root}/v1/contexts"
    context = ask("POST", contexts, arguments.api_key, body)
    where = f"{contexts}/{context['id']}"
    try:
        with StepBar("preparing, tokens") as bar:
            while context["status"] == "pending":
                bar(context["computed_tokens"], context["tokens"])
                time.sleep(_POLL_S)
                context = ask("GET", where, arguments.api_key)
    except KeyboardInterrupt:
        ask("DELETE", where, arguments.api_key)
        raise
    if context["status"] == "released":
        raise ConfigError(f"{arguments.file} was let go: {context['error'] or 'the server ends'}")
    until = datetime.fromtimestamp(context["expires_at"]).isoformat(" ", "minutes")
    print(f"{context['tokens']:,} tokens are kept in memory until {until}", file=sys.stderr)
    # Alone on standard output, for scripts.
    print(context["id"])
    return 0


def _text(file: str) -> str:
    """Return the document. Raises ConfigError where it cannot be read, is no text, or is empty."""
    try:
        text = sys.stdin.read() if file == "-" else read_input(file).decode()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text: convert it first") from None
    if not text.strip():
        raise ConfigError(f"{file} is empty: there is nothing to prepare")
    return text
