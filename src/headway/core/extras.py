"""Modules of the extra `serve`: what a base install does without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headway.core.errors import ConfigError

SERVE_ONLY = frozenset(
    (
        "torch",
        "safetensors",
        "tokenizers",
        "jinja2",
        "fastapi",
        "starlette",
        "uvicorn",
        "zmq",
        "prometheus_client",
        "aiohttp",
    )
)
"""Modules of the extra `serve`; a base install simulates without them."""


@contextmanager
def needs_serve(what: str) -> Iterator[None]:
    """Raise ConfigError for a missing module of the extra, which is the user's to install; others are a fault here."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVE_ONLY:
            raise
        raise ConfigError(f"{what} needs {error.name}: pip install 'headway[serve]'") from None
