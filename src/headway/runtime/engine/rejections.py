"""Rejected requests: the engine turns the error into a delta, and the client turns the delta into the same error."""

from __future__ import annotations

from headway.core.errors import OverloadedError, RequestError, UnavailableError
from headway.runtime.engine.protocol import OutputDelta, Rejection

RejectionError = RequestError | OverloadedError | UnavailableError


def rejection_delta(request_id: str, error: RejectionError, now: float) -> OutputDelta:
    """Return the last delta of a request that was not taken on because of `error`."""
    rejected: Rejection = "invalid"
    param = None
    match error:
        case OverloadedError():
            rejected = "overloaded"
        case UnavailableError():
            rejected = "unavailable"
        case RequestError():
            param = error.param
    return OutputDelta(id=request_id, finish="error", error=str(error), rejected=rejected, param=param, emitted_s=now)


def rejection_error(delta: OutputDelta) -> RejectionError | None:
    """Return the error that a delta stands for, or None if the request was accepted."""
    message = delta.error or "the engine refused the request"
    match delta.rejected:
        case None:
            return None
        case "overloaded":
            return OverloadedError(message)
        case "unavailable":
            return UnavailableError(message)
        case "invalid":
            return RequestError(message, delta.param)
