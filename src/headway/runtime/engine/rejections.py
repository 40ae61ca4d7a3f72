"""Rejected requests: the engine turns the error into a delta, and the client turns the delta into the same error."""

from __future__ import annotations

import numpy as np

from headway.core.errors import OverloadedError, RequestError, UnavailableError
from headway.runtime.engine.protocol import EngineInfo, OutputDelta, Rejection, SubmitRequest

RejectionError = RequestError | OverloadedError | UnavailableError


def rejection_delta(request_id: str, error: RejectionError, now: float) -> OutputDelta:
    """Return the last delta of a request that was not taken on because of `error`."""
    rejected: Rejection = "invalid"
    param, retry_after_s = None, 1.0
    match error:
        case OverloadedError():
            rejected, retry_after_s = "overloaded", error.retry_after_s
        case UnavailableError():
            rejected = "unavailable"
        case RequestError():
            param = error.param
    return OutputDelta(
        id=request_id,
        finish="error",
        error=str(error),
        rejected=rejected,
        param=param,
        retry_after_s=retry_after_s,
        emitted_s=now,
    )


def rejection_error(delta: OutputDelta) -> RejectionError | None:
    """Return the error that a delta stands for, or None if the request was accepted."""
    message = delta.error or "the engine refused the request"
    match delta.rejected:
        case None:
            return None
        case "overloaded":
            return OverloadedError(message, delta.retry_after_s)
        case "unavailable":
            return UnavailableError(message)
        case "invalid":
            return RequestError(message, delta.param)


def check_tokens(submit: SubmitRequest, prompt: memoryview, info: EngineInfo) -> int:
    """Check prompt and earlier output of a request against the model. Return the most output tokens that it may have,
    from its beginning. Raises RequestError."""
    if prompt.nbytes % 4:
        raise RequestError(f"the prompt frame has {prompt.nbytes} bytes, which are not whole token ids", "prompt")
    ids = np.frombuffer(prompt, dtype=np.int32)
    if ids.size == 0 or ids.size != submit.prompt_tokens:
        raise RequestError(f"the prompt frame holds {ids.size} tokens, not {submit.prompt_tokens}", "prompt")
    # At least one output token must fit behind the prompt.
    if ids.size + 1 > info.max_model_len:
        raise RequestError(
            f"the prompt has {ids.size} tokens; this model serves at most {info.max_model_len} tokens, output included",
            "prompt",
        )
    if int(ids.min()) < 0 or int(ids.max()) >= info.vocab_size:
        raise RequestError(f"token ids must be between 0 and {info.vocab_size - 1}", "prompt")
    # Output emitted by an earlier incarnation counts: the limits are those of the original request.
    most = min(submit.params.max_tokens, info.max_model_len - int(ids.size))
    emitted = len(submit.output)
    if emitted >= most or not all(0 <= token < info.vocab_size for token in submit.output):
        raise RequestError(f"{emitted} tokens cannot be the output so far of at most {most} tokens", "output")
    return int(most)
