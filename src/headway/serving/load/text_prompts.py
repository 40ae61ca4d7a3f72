"""Prompts of random token ids that begin alike exactly where a trace says that they do, answers included."""

from __future__ import annotations

from zlib import crc32

from headway.serving.load.prompts import POOL_TOKENS, PromptPool
from headway.sim.workload import TraceRequest


class TextPrompts:
    """Prompts of a trace's requests: each piece of their texts (`PromptText`) has ids of its own.

    Where a prompt repeats an answer, it has the answer's ids if they are known, else other random ones."""

    def __init__(self, pool: PromptPool) -> None:
        self._pool = pool
        # Ids of answers by namespace and piece.
        self._answers: dict[tuple[int, int], list[int]] = {}

    def prompt(self, request: TraceRequest) -> bytes:
        """Return a request's prompt as a JSON array of ids."""
        parts, at = [], 0
        text = request.text.cut(request.prompt_tokens) if request.text is not None else None
        for end, number in text.pieces if text is not None else ():
            assert text is not None
            piece = (text.namespace, number)
            known = self._answers.get(piece, [])[: end - at]
            # By the piece alone: the order in which turns come depends on the server.
            place = crc32(repr(piece).encode()) % POOL_TOKENS
            parts += [",".join(map(str, known)).encode(), self._pool.ids(end - at - len(known), place)]
            at = end
        parts.append(self._pool.ids(request.prompt_tokens - at, self._pool.place()))
        return b"[" + b",".join(part for part in parts if part) + b"]"

    def answered(self, request: TraceRequest, ids: list[int]) -> None:
        """Note the answer to a request, which later prompts may repeat."""
        text = request.text
        # Text behind the prompt is the answer.
        if text is not None and text.tokens > request.prompt_tokens:
            self._answers[text.namespace, text.pieces[-1].id] = ids
