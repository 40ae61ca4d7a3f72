"""Log-probabilities of a prompt's own tokens, collected chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headway.core.sampling import TokenLogprobs
from headway.runtime.model.sampling import score

_ROWS = 64
"""Rows whose logits exist at one time: 64 rows of a vocabulary of 128K take 32 MiB."""


class PromptScores:
    """Scores of one request's prompt. A chunk that is computed again replaces its scores.

    count: alternatives for each token; prompt_tokens: length of the prompt.
    """

    def __init__(self, count: int, prompt_tokens: int) -> None:
        self._count = count
        self._prompt_tokens = prompt_tokens
        # By the position of the token that is scored; the first token has no score.
        self._scores: dict[int, TokenLogprobs] = {}
        self._reported = False

    def add(
        self, start: int, hidden: Tensor, tokens: Callable[[int, int], Tensor], head: Callable[[Tensor], Tensor]
    ) -> None:
        """Score the tokens that follow the rows of a chunk.

        hidden: (R, hidden) after the last layer, of positions [start, start + R); tokens: ids of a range of positions;
        head: rows to logits (R, vocab).
        """
        stop = min(start + hidden.shape[0], self._prompt_tokens - 1)
        for first in range(start, stop, _ROWS):
            rows = min(_ROWS, stop - first)
            logits = head(hidden[first - start : first - start + rows])
            found = score(logits, tokens(first + 1, rows).to(logits.device), self._count)
            self._scores.update(enumerate(found, first + 1))

    def report(self) -> tuple[TokenLogprobs, ...] | None:
        """Return the scores of tokens 1, 2, … of the prompt, the first time; None afterwards.

        Raises KeyError when a part of the prompt was not computed here.
        """
        if self._reported:
            return None
        self._reported = True
        return tuple(self._scores.pop(position) for position in range(1, self._prompt_tokens))
