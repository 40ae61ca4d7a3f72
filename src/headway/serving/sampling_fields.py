"""Sampling parameters for the engine, from a validated request body."""

from __future__ import annotations

import secrets

from headway.core.errors import RequestError
from headway.core.sampling import SamplingParams
from headway.serving.json_object import check_integer
from headway.serving.request_bodies import GenerationBody

_UNLIMITED = 2**31 - 1


def sampling_params(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    vocab_size: int,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the parameters of a request. max_tokens None: as many as the model allows, settled by `fit_length`.

    Without a seed one is drawn, so that recomputation of a request continues its own random stream. Raises RequestError
    for token ids outside the vocabulary.
    """
    limit = _UNLIMITED if max_tokens is None else max_tokens
    if body.min_tokens > limit:
        message = f"'min_tokens' ({body.min_tokens}) must not be above the output limit ({limit})"
        raise RequestError(message, "min_tokens")
    stops = body.stop_token_ids
    return SamplingParams(
        max_tokens=limit,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        # -1 means all tokens for vLLM's clients, 0 for the sampler.
        top_k=max(0, body.top_k),
        min_p=body.min_p,
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        seed_drawn=body.seed is None,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=body.ignore_eos,
        stop_token_ids=tuple(check_integer(token, "stop_token_ids", 0, vocab_size - 1) for token in stops),
    )


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    for key in biases:
        # Keys of a JSON object are text; under 10 digits, so that int() of a long one is never computed.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            message = f"'logit_bias' has a key that is not a token id in 0..{vocab_size - 1}"
            raise RequestError(message, "logit_bias")
    return {int(key): bias for key, bias in biases.items()}
