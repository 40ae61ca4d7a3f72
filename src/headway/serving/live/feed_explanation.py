"""Explanation of a request by the samples that a feed has kept of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from headway.core.errors import ConfigError
from headway.serving.live.feed import MOST_BLOCKS, FeedBlock, FeedTransfer, FollowedRequest, LiveFeed
from headway.sim.explanation import RequestExplanation, RequestSurroundings, explain_record, find
from headway.sim.metrics import RequestRecord
from headway.sim.replay import KvTransfer, ReplayedChunk, ReplayedStep


def explain_request(
    feed: LiveFeed,
    request_id: str,
    known: Mapping[str, FollowedRequest],
    blocks: Sequence[FeedBlock],
    transfers_kept: Iterable[FeedTransfer],
) -> RequestExplanation:
    """Explain one of the `known` requests by the samples and slices that are kept. Raises ConfigError for any other."""
    request = known[find(known.keys(), request_id, "the last minutes' feed")]
    until_s = request.last_token_s if request.ended_s is not None and request.last_token_s is not None else math.inf
    around = [one for one in blocks if request.arrival_s < one.sample.end_s and one.sample.start_s < until_s]
    transfers = [_moved(one) for one in transfers_kept if one.request == request.id]
    computed_on = {one.instance for one in around for chunk in one.sample.chunks if chunk.request == request.id}
    # Where its prompt is computed; with its first token it may go elsewhere.
    before = computed_on or {one.instance for one in around}
    after = {one.target for one in transfers} or before
    if blocks and len(blocks) == MOST_BLOCKS and blocks[0].sample.start_s > request.arrival_s:
        raise ConfigError(f"{request.id}: its first iterations are no longer kept; serve with --event-log for that")
    first, last = request.first_token_s, request.last_token_s
    record = RequestRecord(
        id=request.id,
        klass=request.request_class,
        arrival_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        token_s=() if first is None else (first,) if last is None or last == first else (first, last),
        finish_s=request.ended_s,
        error=None if first is not None else request.reason or "it still waits",
    )
    around_it = RequestSurroundings(
        [
            _step(one, request)
            for one in around
            if one.instance in (before if first is None or one.sample.end_s <= first else after)
        ],
        feed.policy,
        feed.aim_s,
        transfers=transfers,
    )
    return explain_record(record, around_it, request.worst_gap)


def _moved(one: FeedTransfer) -> KvTransfer:
    return KvTransfer(one.sample.source, one.target, one.sample.start_s, one.sample.end_s)


def _step(block: FeedBlock, request: FollowedRequest) -> ReplayedStep:
    one = block.sample
    own = frozenset((request.id,)) if _decodes(request, one.end_s) else frozenset[str]()
    chunks = tuple(
        ReplayedChunk(c.request, c.start, c.tokens, c.remaining, c.tokens >= c.remaining, c.limit)  # type: ignore[arg-type]
        for c in one.chunks
    )
    decoding = own | _others(one.decodes - len(own))
    return ReplayedStep(block.number, one.decided_s, one.start_s, one.end_s, one.predicted_s, 0.0, decoding, chunks)


@cache
def _others(count: int) -> frozenset[str]:
    """Return names of decodes of which the sample has the number only."""
    return frozenset(f"decode {number}" for number in range(count))


def _decodes(request: FollowedRequest, at_s: float) -> bool:
    """Whether an iteration that ended at `at_s` gave a request a token after its first."""
    first_s, last_s, gap = request.first_token_s, request.last_token_s, request.worst_gap
    if first_s is None or last_s is None or not first_s < at_s <= last_s:
        return False
    return gap is None or not gap[0] < at_s < gap[1]
