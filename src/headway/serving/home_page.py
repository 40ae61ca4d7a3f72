"""GET /: one plain page that says what is served and links what else there is, without scripts or the network."""

from __future__ import annotations

from html import escape

from headway.core.errors import UnavailableError
from headway.serving.banner import example
from headway.serving.context import ServerContext
from headway.serving.docs_page import PAGE_STYLE

_LINKS = (
    ("ui/", "what runs now, and why requests wait"),
    ("docs", "every endpoint and field"),
    ("v1/models", "the names that the model is served by"),
    ("metrics", "Prometheus metrics"),
    ("health", "for a liveness probe"),
    ("ready", "for a readiness probe"),
    ("version", "of the server"),
    ("openapi.json", "the endpoints, for programs"),
)


def home_page(server: ServerContext, url: str) -> str:
    """Return the page. url: the server's address as the client spelt it."""
    try:
        info = server.engine.info
        what = f"{', '.join(server.models())}: {info.dtype} on {info.device}, up to {info.max_model_len:,} tokens"
        call = f"<h2>Ask it</h2><pre><code>{escape(example(server, url))}</code></pre>"
    except UnavailableError as error:
        what, call = str(error), ""
    links = _LINKS if server.live is not None else _LINKS[1:]
    rows = "".join(f'<tr><th><a href="{path}">/{path}</a></th><td>{escape(text)}</td></tr>' for path, text in links)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Headway</title>'
        f'<meta name="viewport" content="width=device-width"><style>{PAGE_STYLE}</style></head><body><h1>Headway</h1>'
        f"<p>{escape(what)}. Engine: {escape(server.engine.state)}.</p>{call}<h2>Pages</h2><table>{rows}</table>"
        "</body></html>"
    )
