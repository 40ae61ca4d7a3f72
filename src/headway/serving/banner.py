"""What a server prints when it has started: what runs, where, and how to ask it something."""

from __future__ import annotations

import json

from headway.runtime.build.engine_summary import line, summary
from headway.runtime.cluster.cluster_report import InstanceAdmin
from headway.runtime.embedded import MODEL_NAME
from headway.runtime.embedded.passkey import QUESTION, needle
from headway.serving.context import ServerContext


def banner(server: ServerContext, url: str) -> str:
    """Return the lines. url: where the server listens. Called when the engine is ready."""
    info, settings = server.engine.info, server.settings
    engine: object = server.engine
    kind = "vllm" if info.device == "http" else "native"
    if isinstance(engine, InstanceAdmin):
        kind += f", {len(engine.report().instances)} instances"
    lines = ["", f"Headway serves {', '.join(server.models())} at {url}", ""]
    lines += [line("engine", kind), *summary(info)]
    lines += [line("pages", f"{url}/ (links to /ui, /metrics, /health)"), "", example(server, url), ""]
    if settings.api_key is not None:
        lines.insert(-1, "(the key is the one that this server was given)")
    return "\n".join(lines)


def example(server: ServerContext, url: str) -> str:
    """Return a curl command that the server answers. An API key is named by its variable, never shown."""
    path, body = example_call(server)
    key = "" if server.settings.api_key is None else ' -H "Authorization: Bearer $HEADWAY_API_KEY"'
    return f"curl {url}/{path}{key} -H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'"


def example_call(server: ServerContext) -> tuple[str, dict[str, object]]:
    """Return path and body of a request that the model can answer: a chat if it has a template, else a completion.

    The embedded model is asked for a passkey, the one thing that it can do.
    """
    embedded = server.engine.info.model == MODEL_NAME
    text = f"{needle('84213')}{QUESTION}" if embedded else "Hello"
    body: dict[str, object] = {"model": server.models()[0], **({"temperature": 0} if embedded else {})}
    if server.tokenizer.has_template:
        return "v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    return "v1/completions", {**body, "prompt": text if server.tokenizer.has_text else [1, 2, 3]}
