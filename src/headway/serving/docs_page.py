"""/docs: the OpenAPI description as one page of plain HTML, without scripts and without the network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

# The browser loads nothing but inline styles: descriptions cannot run scripts.
DOCS_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

PAGE_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 54rem; padding: 0 1rem; color: #1a1a1a; }
pre { overflow-x: auto; }
h2 { border-top: 1px solid #ccc; margin-top: 2rem; padding-top: 1rem; font-size: 1.1rem; }
code, th { font-family: ui-monospace, monospace; font-size: .9em; }
.method { display: inline-block; min-width: 3.2rem; font-weight: 600; color: #0a5; }
table { border-collapse: collapse; } th, td { padding: .1rem 1.5rem .1rem 0; text-align: left; font-weight: 400; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #ddd; } h2 { border-color: #444; } }
"""

_LEAST = {"minimum": "from", "exclusiveMinimum": "above"}
"""Lower limits of a JSON schema, in words."""


def docs_page(openapi: Mapping[str, Any]) -> str:
    """Return the page: each endpoint of the OpenAPI description with its summary, text, and body fields."""
    info = openapi["info"]
    title = escape(f"{info['title']} {info['version']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{PAGE_STYLE}</style></head><body><h1>{title}</h1>',
        '<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, methods in openapi["paths"].items():
        for method, endpoint in methods.items():
            parts.append(_endpoint(path, method, endpoint))
    return "\n".join([*parts, "</body></html>"])


def _endpoint(path: str, method: str, endpoint: Mapping[str, Any]) -> str:
    lines = [
        f'<h2><span class="method">{escape(method.upper())}</span> <code>{escape(path)}</code></h2>',
        f"<p><b>{escape(endpoint.get('summary', ''))}.</b> {escape(endpoint.get('description', ''))}</p>",
    ]
    content = endpoint.get("requestBody", {}).get("content", {})
    for kind, body in content.items():
        schema = body["schema"]
        required = schema.get("required", [])
        rows = [_row(name, field, name in required) for name, field in schema["properties"].items()]
        lines.append(f"<p>Body: <code>{escape(kind)}</code></p><table>{''.join(rows)}</table>")
    return "\n".join(lines)


def _row(name: str, field: Mapping[str, Any], required: bool) -> str:
    """Return the row of one field: type, whether required or its default, limits, description."""
    kinds = " or ".join(each["type"] for each in field.get("anyOf", [field]) if "type" in each) or "any"
    low = next((f"{word} {_number(field[key])}" for key, word in _LEAST.items() if key in field), "")
    high = f"to {_number(field['maximum'])}" if "maximum" in field else ""
    # What holds when the client leaves the field out.
    left_out = "required" if required else f"default {json.dumps(field['default'])}" if "default" in field else ""
    cells = (kinds, left_out, f"{low} {high}".strip(), field.get("description", ""))
    return f"<tr><th>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _number(value: float) -> str:
    """Format a limit; the OpenAPI description has floats for the limits of integers."""
    return str(int(value)) if value == int(value) else str(value)
