"""GET /: one page that says what is served, asks the model something at a click, and links what else there is."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape

from headway.core.errors import UnavailableError
from headway.serving.context import ServerContext
from headway.serving.run import example, example_call

_SCRIPT = """
const button = document.querySelector("button"), output = document.querySelector("output");
button.onclick = async () => {
  button.disabled = true;
  output.textContent = "…";
  try {
    const headers = {"content-type": "application/json"};
    const reply = await fetch(button.dataset.path, {method: "POST", headers, body: button.dataset.body});
    const answer = await reply.json();
    const choice = reply.ok ? answer.choices[0] : null;
    output.textContent = choice ? (choice.message ? choice.message.content : choice.text) : answer.error.message;
  } catch (error) {
    output.textContent = String(error);
  }
  button.disabled = false;
};
"""
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

HOME_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; script-src 'sha256-{_SCRIPT_HASH}'"
    )
}
"""The browser runs this one script and loads nothing else: names of models cannot run scripts."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 54rem; padding: 0 1rem; color: #1a1a1a; }
pre { overflow-x: auto; }
h2 { border-top: 1px solid #ccc; margin-top: 2rem; padding-top: 1rem; font-size: 1.1rem; }
code, th { font-family: ui-monospace, monospace; font-size: .9em; }
table { border-collapse: collapse; } th, td { padding: .1rem 1.5rem .1rem 0; text-align: left; font-weight: 400; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } h2 { border-color: #444; } }
"""

_LINKS = (
    ("ui/", "what runs now, and why requests wait"),
    ("v1/models", "the names that the model is served by"),
    ("metrics", "Prometheus metrics"),
    ("health", "for a liveness probe"),
    ("ready", "for a readiness probe"),
    ("version", "of the server"),
    ("openapi.json", "every endpoint and field; docs/reference/http-api.md says how they behave"),
)


def home_page(server: ServerContext, url: str) -> str:
    """Return the page. url: the server's address as the client spelt it."""
    try:
        info = server.engine.info
        what = f"{', '.join(server.models())}: {info.dtype} on {info.device}, up to {info.max_model_len:,} tokens"
        call = f"<h2>Ask it</h2><pre><code>{escape(example(server, url))}</code></pre>{_try_button(server)}"
    except UnavailableError as error:
        what, call = str(error), ""
    links = _LINKS if server.live is not None else _LINKS[1:]
    rows = "".join(f'<tr><th><a href="{path}">/{path}</a></th><td>{escape(text)}</td></tr>' for path, text in links)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Headway</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><h1>Headway</h1>'
        f"<p>{escape(what)}. Engine: {escape(server.engine.state)}.</p>{call}<h2>Pages</h2><table>{rows}</table>"
        "</body></html>"
    )


def _try_button(server: ServerContext) -> str:
    """Return a button that sends the example and shows the answer; nothing where clients need a key."""
    if server.settings.api_key is not None:
        return ""
    path, body = example_call(server)
    data = f'data-path="{path}" data-body="{escape(json.dumps(body))}"'
    return f"<p><button {data}>Try it</button> <output></output></p><script>{_SCRIPT}</script>"
