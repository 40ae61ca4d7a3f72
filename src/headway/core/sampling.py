"""How the next token is drawn. Built by the server from the request body, used by the model's sampler."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling settings, validated by whoever builds it (the server).

    temperature 0 is greedy. top_k 0 and top_p 1 and min_p 0 are off. Draws come from a counter generator keyed by
    (seed, position), so that a request which is computed again continues the same stream; seed None means that the
    server has drawn one. `logprobs` is None (off) or the number of most likely alternatives to report (0..20).
    Stop *strings* are the detokeniser's business and not here; `stop_token_ids` and the model's own end tokens are.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of the drawn token, and of the most likely ones, under the model's own distribution.

    Natural logarithm, before temperature, penalties and truncation (the convention of the OpenAI API).
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
