"""The sampling part of a request body, checked: every limit in one table's worth of lines."""

from __future__ import annotations

import secrets

from headway.core.errors import RequestError
from headway.core.sampling import SamplingParams
from headway.serving.body_fields import BodyFields, check_integer, check_number, kind

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
_HUGE = 2**31 - 1
_INT64 = 2**63


def read_sampling(
    fields: BodyFields, *, max_tokens: int | None, logprobs: int | None, vocab_size: int
) -> SamplingParams:
    """Everything that the engine's sampler needs. `max_tokens` None: as many as the model allows, settled later.

    Without a seed one is drawn, so that a request that has to be computed again continues its own stream.
    """
    limit = _HUGE if max_tokens is None else max_tokens
    min_tokens = fields.integer("min_tokens", 0, _HUGE) or 0
    if min_tokens > limit:
        raise RequestError(f"'min_tokens' ({min_tokens}) must not be above the output limit ({limit})", "min_tokens")
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1, above_low=True)
    repetition = fields.number("repetition_penalty", 0, 100, above_low=True)
    seed = fields.integer("seed", -_INT64, _INT64 - 1)
    return SamplingParams(
        max_tokens=limit,
        min_tokens=min_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(0, fields.integer("top_k", -1, _HUGE) or 0),
        min_p=fields.number("min_p", 0, 1) or 0.0,
        seed=secrets.randbits(63) if seed is None else seed,
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(fields, vocab_size),
        logprobs=logprobs,
        ignore_eos=fields.flag("ignore_eos"),
        stop_token_ids=_stop_token_ids(fields, vocab_size),
    )


def read_stops(fields: BodyFields) -> tuple[str, ...]:
    """`stop`: one string or up to 16, none of them empty."""
    value = fields.get("stop")
    items = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise RequestError("'stop' must be a string or an array of strings", "stop")
    if len(items) > MAX_STOPS:
        raise RequestError(f"'stop' holds {len(items)} strings; at most {MAX_STOPS} are allowed", "stop")
    for item in items:
        if not 1 <= len(item) <= MAX_STOP_CHARS:
            raise RequestError(f"a 'stop' string must have 1..{MAX_STOP_CHARS} characters (got {len(item)})", "stop")
    return tuple(dict.fromkeys(items))


def _stop_token_ids(fields: BodyFields, vocab_size: int) -> tuple[int, ...]:
    name = "stop_token_ids"
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RequestError(f"'{name}' must be an array of token ids, not {kind(value)}", name)
    if len(value) > 1024:
        raise RequestError(f"'{name}' holds {len(value)} ids; at most 1024 are allowed", name)
    return tuple(check_integer(item, name, 0, vocab_size - 1) for item in value)


def _logit_bias(fields: BodyFields, vocab_size: int) -> dict[int, float]:
    name = "logit_bias"
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(f"'{name}' must be an object of token id to bias, not {kind(value)}", name)
    if len(value) > 1024:
        raise RequestError(f"'{name}' has {len(value)} entries; at most 1024 are allowed", name)
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise RequestError(f"'{name}' has a key that is not a token id in 0..{vocab_size - 1}", name)
        found[int(key)] = check_number(bias, name, -100, 100)
    return found
