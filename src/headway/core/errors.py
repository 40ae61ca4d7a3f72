"""Errors that a user may see. Each message has what is wrong, with the numbers, and what to do about it.

Every error that Headway raises on purpose derives from `HeadwayError`; anything else that escapes is a bug.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class HeadwayError(Exception):
    """Base of all errors raised on purpose. `str(error)` is fit to be shown to a user."""


class ConfigError(HeadwayError):
    """A setting, a file or a combination of them cannot work. Raised before anything starts."""


class CheckpointError(ConfigError):
    """A model folder cannot be loaded: missing, truncated or misshapen tensors, or an unsupported architecture."""


class RequestError(HeadwayError):
    """One request is at fault and is refused; other requests go on untouched (HTTP 400).

    `param` names the field of the request that is wrong, where one can be named.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class OverloadedError(HeadwayError):
    """The queue is full; try again after `retry_after_s` (HTTP 429 with Retry-After)."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PredictedLateError(OverloadedError):
    """The first token is predicted to come later than was asked for, by a request that is then not to be served."""

    def __init__(self, message: str, retry_after_s: float, predicted_s: float) -> None:
        """`predicted_s`: the predicted time to the first token."""
        super().__init__(message, retry_after_s)
        self.predicted_s = predicted_s


class UnavailableError(HeadwayError):
    """The engine is starting, draining or lost; try again after `retry_after_s` (HTTP 503 with Retry-After)."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LostError(HeadwayError):
    """The computing process is gone, hung or cut off: all KV and everything in flight is lost (`Executor.recover`)."""


class InvariantError(HeadwayError):
    """An internal invariant does not hold (`BlockManager.check()`, a batch out of sequence). Always a bug of ours."""


@contextmanager
def reading(what: str, passing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Within it, whatever the contents of a file lead to is a ConfigError that begins with `what`.

    passing: errors that are raised as they are."""
    try:
        yield
    except passing:
        raise
    except Exception as error:
        words = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{what}: {words[:300]}") from error


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
