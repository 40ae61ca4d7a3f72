"""What an engine refuses travels as a delta, and is an error again where its client waits: both ways, in one place."""

from __future__ import annotations

from headway.core.errors import OverloadedError, RequestError, UnavailableError
from headway.runtime.engine.protocol import OutputDelta

Refusal = RequestError | OverloadedError | UnavailableError

_WORDS: dict[type[Exception], str] = {OverloadedError: "overloaded", UnavailableError: "unavailable"}


def refused(request_id: str, error: Refusal, now: float) -> OutputDelta:
    """The delta that says why a request is not taken on: `param` is the field at fault, or which limit it was."""
    param = _WORDS.get(type(error)) or getattr(error, "param", None)
    return OutputDelta(id=request_id, finish="error", error=str(error), param=param, emitted_s=now)


def refusal(delta: OutputDelta) -> Refusal | None:
    """The error that a delta stands for; None where it is none of the request's doing."""
    if delta.finish != "error" or delta.param is None:
        return None
    message = delta.error or "the engine refused the request"
    if delta.param == _WORDS[OverloadedError]:
        return OverloadedError(message)
    if delta.param == _WORDS[UnavailableError]:
        return UnavailableError(message)
    return RequestError(message, delta.param)
