"""Pieces of an answer's text; the first may be the prompt, with its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headway.core.sampling import TokenLogprobs
from headway.serving.generation_job import GenerationJob
from headway.serving.logprobs import ScoredToken
from headway.serving.prompts import TokenPrompt
from headway.serving.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one delta adds to the answer."""

    text: str
    """Text that can be shown now; it may lag behind `tokens`."""
    tokens: tuple[int, ...]
    scored: tuple[ScoredToken, ...] = ()
    """Log-probabilities of tokens whose text has been shown."""
    prompt_scored: tuple[ScoredToken, ...] | None = None
    """The prompt's tokens, on the first piece of a request that asks for their log-probabilities."""
    finish: Literal["stop", "length"] | None = None
    """Set on the last piece only."""
    stop_reason: str | int | None = None
    """The stop string or the token id that ended the answer, where one did."""

    @property
    def visible(self) -> bool:
        """Whether the piece is sent: a piece is empty while its text may still become part of a stop string."""
        return bool(self.tokens or self.text or self.finish is not None)

    def with_scores(self, scores: Sequence[TokenLogprobs] | None) -> TextPiece:
        """Return an opening with the log-probabilities of the prompt's tokens from the second on.

        Without them it is the prompt's text alone.
        """
        if self.prompt_scored is None:
            return self
        if scores is None:
            raise ValueError("the engine did not report the prompt's log-probabilities")
        # The first token has none.
        found = (None, *scores)
        scored = tuple(replace(one, logprobs=each) for one, each in zip(self.prompt_scored, found, strict=True))
        return replace(self, prompt_scored=scored, scored=scored if self.scored else ())


def opening_of(tokenizer: ModelTokenizer, job: GenerationJob, prompt: TokenPrompt) -> TextPiece | None:
    """Return the piece before an answer, or None: the prompt, its tokens still without log-probabilities."""
    wanted = job.params.prompt_logprobs is not None
    if not (job.text.echo or wanted):
        return None
    decoder = tokenizer.detokeniser(skip_special_tokens=job.text.skip_special_tokens)
    parts: list[str] = []
    tokens: list[ScoredToken] = []
    at = 0
    for token in prompt.data.cast("i"):
        tokens.append(ScoredToken(token, None, at))
        parts.append(decoder.feed(token))
        at += len(parts[-1])
    parts.append(decoder.flush())
    text = "".join(parts) if job.text.echo else ""
    scored = tuple(tokens) if wanted else None
    return TextPiece(text, (), (scored or ()) if job.text.echo else (), prompt_scored=scored)
