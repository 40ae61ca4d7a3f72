"""The body and headers of `POST /v1/completions` for one attempt at a request."""

from __future__ import annotations

import hashlib
import sys
from array import array
from typing import Any

from headway.control.request_lifecycle import AttemptContinuation
from headway.core.errors import RequestError
from headway.runtime.engine.protocol import SubmitRequest


def check_supported(submit: SubmitRequest) -> None:
    """Raise RequestError for what an instance behind HTTP cannot be asked for."""
    params = submit.params
    if params.logprobs is not None or params.prompt_logprobs is not None:
        raise RequestError("log-probabilities are not passed on by a cluster of HTTP instances", "logprobs")


def begins_anew(submit: SubmitRequest) -> bool:
    """Return whether another attempt has to begin with the bare prompt: its penalties count output tokens alone."""
    return bool(submit.params.presence_penalty or submit.params.frequency_penalty)


def completion_body(
    submit: SubmitRequest, prompt: bytes | memoryview, model: str, continuation: AttemptContinuation, priority: int
) -> dict[str, Any]:
    """Return the JSON body. priority: that the policy gives it.

    Every setting that a server could fill from a checkpoint's generation_config.json is given, so that instances agree.
    """
    ids = array("i", bytes(prompt))
    if sys.byteorder == "big":
        ids.byteswap()
    params = submit.params
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*ids, *continuation.output],
        "max_tokens": continuation.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stream": True,
        "return_token_ids": True,
    }
    optional = {
        "min_tokens": continuation.min_tokens,
        # Greedy answers need none, and one that was drawn here promises nothing: an answer that goes on elsewhere does
        # not continue its random stream.
        "seed": params.seed if params.temperature and not params.seed_drawn else None,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias.items()},
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": list(params.stop_token_ids),
        "priority": priority,
        "cache_salt": sent_salt(submit),
    }
    return body | {name: value for name, value in optional.items() if value}


def sent_salt(submit: SubmitRequest) -> str:
    """Return the salt of all attempts at a request, of letters and digits alone, as vLLM demands; empty: none.

    A request that shares no prefix still finds its own after a pause."""
    salt = submit.cache_salt if submit.prefix_cache else f"{submit.cache_salt} {submit.id}"
    return hashlib.sha256(salt.encode()).hexdigest() if salt else ""


def request_headers(submit: SubmitRequest, attempt: int, api_key: str | None) -> dict[str, str]:
    """Return the headers of one attempt: its id, SLOs, and the instances' key."""
    headers = {"X-Request-Id": f"{submit.id}-{attempt}"}
    if submit.slo.ttft_s is not None:
        headers["x-llm-d-slo-ttft-ms"] = f"{submit.slo.ttft_s * 1e3:.3f}"
    if submit.slo.tbt_s is not None:
        headers["x-llm-d-slo-tpot-ms"] = f"{submit.slo.tbt_s * 1e3:.3f}"
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers
