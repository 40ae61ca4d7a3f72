"""Which prompts of a trace begin alike: texts without words, from which keys of KV blocks are made."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from headway.sim.workload.trace_request import TraceRequest

_BLOCK_BITS = 20
"""Bits of a block's place in a key: prompts of up to 2^20 blocks."""
_PIECE_BITS = 32
_end = attrgetter("end")
_UNIQUE = 1 << 20
"""Above all namespaces: of texts that share nothing."""


class TextPiece(NamedTuple):
    """A stretch of a text. Two texts that have a piece of the same id are equal up to its shorter end."""

    end: int
    """Tokens from the start of the prompt to the end of the piece."""
    id: int


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt, and its answer where a later prompt repeats it."""

    pieces: tuple[TextPiece, ...]
    """In order, without gaps."""
    namespace: int = 0
    """Texts of different namespaces (trace files) share nothing."""

    @property
    def tokens(self) -> int:
        return self.pieces[-1].end if self.pieces else 0

    def keys(self, block_tokens: int) -> list[int]:
        """Return the keys of all full blocks: equal exactly where the trace says that two prefixes are equal.

        A block is known by the piece in which it ends. With blocks that do not divide the trace's, a hit may be shorter
        than the trace allows by less than one of its blocks."""
        keys: list[int] = []
        for end, piece in self.pieces:
            base = ((self.namespace << _PIECE_BITS) + piece) << _BLOCK_BITS
            keys.extend(range(base + len(keys), base + end // block_tokens))
        return keys

    def cut(self, tokens: int) -> PromptText:
        """Return the text up to `tokens`."""
        if tokens >= self.tokens:
            return self
        place = bisect_left(self.pieces, tokens, key=_end)
        return PromptText((*self.pieces[:place], TextPiece(tokens, self.pieces[place].id)), self.namespace)

    def and_then(self, end: int, piece: int) -> PromptText:
        """Return the text with another piece behind it, up to token `end`."""
        return PromptText((*self.pieces, TextPiece(end, piece)), self.namespace) if end > self.tokens else self

    def and_unique(self, end: int, number: int) -> PromptText:
        """Return the text up to token `end`, of which nothing new is in a text of another number."""
        return self.and_then(end, (_UNIQUE << _PIECE_BITS) + number)


def text_of_blocks(ids: Sequence[int], block_tokens: int, prompt_tokens: int) -> PromptText:
    """Return the text of a prompt whose blocks have these ids, each of which stands for the whole prefix that it ends.

    What the ids do not cover is not known to be shared. Raises ValueError for an id that is none."""
    if not all(0 <= i < 1 << _PIECE_BITS for i in ids):
        raise ValueError("hash_ids must be whole numbers from 0 to 2^32 - 1")
    ends = range(block_tokens, prompt_tokens + block_tokens, block_tokens)
    return PromptText(tuple(TextPiece(min(end, prompt_tokens), i) for end, i in zip(ends, ids, strict=False)))


def shared_tokens(requests: Iterable[TraceRequest], block_tokens: int) -> int:
    """Return how many prompt tokens one infinite cache has, in which each prompt, and its answer if known, is at once.

    The last token of a prompt is always computed."""
    cached: set[int] = set()
    hits = 0
    for request in requests:
        if request.text is None:
            continue
        keys = request.text.keys(block_tokens)
        shareable = keys[: (request.prompt_tokens - 1) // block_tokens]
        hits += next((n for n, key in enumerate(shareable) if key not in cached), len(shareable)) * block_tokens
        cached.update(keys)
    return hits


def with_session_texts(requests: Iterable[TraceRequest], grain: int = 64) -> list[TraceRequest]:
    """Give the requests of sessions texts: each begins with the `cached_tokens` of an earlier prompt of its session.

    That is the thread's last prompt if it is long enough, else the session's latest that is. Where a thread's prompt
    repeats the whole one before it (but for a block of `grain` tokens, in which traces count) and has room for the
    answer, it repeats the answer too. `requests`: in order of time within each session; those without one stay."""
    texts: list[TraceRequest] = []
    # By session: places in `texts` of its requests; by thread: of the last one.
    earlier: dict[str, list[int]] = {}
    last: dict[tuple[str, str], int] = {}
    for number, request in enumerate(requests):
        if request.session is None:
            texts.append(request)
            continue
        thread = (request.session, request.thread)
        source = _source(request, texts, earlier.get(request.session, []), last.get(thread))
        text = PromptText(())
        if source is not None:
            before = texts[source]
            known = before.prompt_tokens + before.output_tokens
            assert before.text is not None
            if _repeats(request, before, grain) and source == last.get(thread):
                text = before.text.cut(before.prompt_tokens).and_then(known, _answer(source))
                texts[source] = replace(before, text=text)
            else:
                text = before.text.cut(request.cached_tokens)
        texts.append(replace(request, text=text.and_then(request.prompt_tokens, 2 * number)))
        earlier.setdefault(request.session, []).append(number)
        last[thread] = number
    return texts


def _answer(number: int) -> int:
    """Id of the piece that is a request's answer; even ones are of prompts."""
    return 2 * number + 1


def _source(request: TraceRequest, texts: list[TraceRequest], earlier: list[int], last: int | None) -> int | None:
    shared = request.cached_tokens
    if not shared:
        return None
    if last is not None and texts[last].prompt_tokens >= shared:
        return last
    return next((i for i in reversed(earlier) if texts[i].prompt_tokens >= shared), None)


def _repeats(request: TraceRequest, before: TraceRequest, grain: int) -> bool:
    whole = before.prompt_tokens - before.prompt_tokens % grain
    return request.cached_tokens >= whole and request.prompt_tokens >= before.prompt_tokens + before.output_tokens
