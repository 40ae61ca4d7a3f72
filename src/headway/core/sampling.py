"""How the next token is drawn. Built by the server from the request body, used by the model's sampler."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling settings, validated by the server. Stop *strings* are handled by the detokeniser.

    Draws come from a counter generator keyed by (seed, position): a request that is computed again continues the same
    stream.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    """1: off."""
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    """0: off."""
    seed: int | None = None
    """None: the server draws one."""
    seed_drawn: bool = False
    """Whether the server has drawn the seed, so that other engines may draw their own."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """Number of most likely alternatives to report, 0..20; None: off."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report for each token of the prompt; None: off. The whole prompt must then be computed:
    KV of a reused prefix has no logits. Single-process engines only."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the request, besides the model's own end tokens."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of the drawn token, and of the most likely ones, under the model's own distribution.

    Natural logarithm, before temperature, penalties and truncation (the convention of the OpenAI API).
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token, log-probability) of the most likely tokens."""
