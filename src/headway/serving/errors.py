"""Errors as the OpenAI error object, the only mapping of Headway's errors to HTTP, and request ids.

Shape: `{"error": {"message", "type", "param", "code"}}`, with `code` the HTTP status as an integer.
"""

from __future__ import annotations

import itertools
import math
import re
import uuid
from typing import Any

import msgspec
from starlette.responses import Response

from headway.core.errors import HeadwayError, OverloadedError, RequestError, UnavailableError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ApiError(HeadwayError):
    """An error with its HTTP status.

    param: the request's field at fault, if there is one; headers: sent with the response.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.headers = headers or {}

    def __reduce__(self) -> tuple[type[ApiError], tuple[Any, ...]]:
        """Pickle all of it: large bodies are refused by another process."""
        return ApiError, (self.status, str(self), self.param, self.headers)


def as_api_error(error: BaseException) -> ApiError:
    """Return the error to show to the client. Unknown exceptions become a bare 500: their text is only logged."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), error.param)
        case OverloadedError():
            return ApiError(429, str(error), headers=_retry_after(error.retry_after_s))
        case UnavailableError():
            return ApiError(503, str(error), headers=_retry_after(error.retry_after_s))
        case HeadwayError():
            return ApiError(500, str(error))
        case _:
            return ApiError(500, "internal error; the server's log has more under this request id")


def _retry_after(seconds: float) -> dict[str, str]:
    # Whole seconds, and at least one: 0 would invite an immediate retry.
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def error_object(error: ApiError) -> dict[str, Any]:
    """Return the OpenAI error object, for a whole response or for one event of a stream."""
    kind = _TYPES.get(error.status, "InternalServerError" if error.status >= 500 else "BadRequestError")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.status}}


def error_response(error: ApiError) -> Response:
    """Make the response to a request that failed before its first byte was sent."""
    return json_response(error_object(error), error.status, error.headers)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make a response of JSON, encoded by msgspec."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def server_ending_error() -> UnavailableError:
    """Return the error for a client whose request the shutdown interrupted."""
    return UnavailableError("the server is ending; send the request again later", 5.0)


# Request ids: the client's, sanitised, is a label in answers and logs; the server's own is the key.
#
# A gateway may give several requests the same id, and a client that tries again its earlier one.

# Everything else could break a header or a log line.
_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")
_LONGEST = 128
_counter = itertools.count()


def request_id(given: str | None) -> str:
    """Return the client's X-Request-Id reduced to letters, digits and `._:-`, or a new random id."""
    cleaned = _UNSAFE.sub("", given)[:_LONGEST] if given else ""
    return cleaned or uuid.uuid4().hex


def own_id() -> str:
    """Return an id that no other request of any server has: its key in the journal."""
    return f"hw-{uuid.uuid4().hex}"


def engine_id(request: str) -> str:
    """Return an id that is unique in this server process, even when clients repeat theirs."""
    return f"{request}#{next(_counter)}"
