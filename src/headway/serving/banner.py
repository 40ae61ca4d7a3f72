"""What a server prints when it has started: what runs, where, and how to ask it something."""

from __future__ import annotations

import json

from headway.runtime.build.engine_summary import line, summary
from headway.runtime.cluster.cluster_report import InstanceAdmin
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
    """Return a curl command that the server answers: a chat where the model has a template, else a completion."""
    model = server.models()[0]
    body: dict[str, object] = {"model": model}
    if server.tokenizer.has_template:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        path = "completions"
        body["prompt"] = "Hello" if server.tokenizer.has_text else [1, 2, 3]
    # A key is never shown.
    key = "" if server.settings.api_key is None else ' -H "Authorization: Bearer $HEADWAY_API_KEY"'
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'"
