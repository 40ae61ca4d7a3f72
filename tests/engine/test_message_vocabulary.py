"""The vocabulary between processes: every message is a tagged struct of `headway.runtime`."""

from __future__ import annotations

import ast
from pathlib import Path

import headway.runtime

MOST = 43
"""Tagged messages between clients, controller, instances, engines, ranks and KV connectors."""


def messages() -> dict[str, str]:
    """Return all classes with a `tag`, by name, with their module's path."""
    found: dict[str, str] = {}
    (root,) = map(Path, headway.runtime.__path__)
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(keyword.arg == "tag" for keyword in node.keywords):
                assert node.name not in found, f"two messages are named {node.name}"
                found[node.name] = str(path.relative_to(root))
    return found


def test_the_vocabulary_grows_only_on_purpose() -> None:
    """`pytest -s` prints the count."""
    found = messages()
    assert "SubmitRequest" in found
    print(f"{len(found)} messages")
    assert len(found) <= MOST, "\n".join(f"{where}: {name}" for name, where in found.items())
