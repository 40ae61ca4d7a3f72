"""What an attempt at a request has and needs of the instances' KV, from its state."""

from __future__ import annotations

from collections.abc import Callable

from headway.control.kv_admission import kv_needs
from headway.control.kv_reservations import KvClaim
from headway.runtime.cluster.attempt import RequestAttempt


def kv_claim(attempt: RequestAttempt, blocks: Callable[[int, int], int]) -> KvClaim:
    """Return the claim of an attempt, at most what it can come to. blocks: rounds (instance, tokens) up to blocks."""
    known = attempt.kv_tokens
    # The whole prompt's from the begin of its first span on: `KvAdmission` has reserved that.
    if attempt.entry is not None and attempt.runs:
        has = kv_needs(attempt.entry)
    elif attempt.spread:
        has = dict.fromkeys(attempt.spread, -(-known // len(attempt.spread)))
    else:
        has = dict.fromkeys(attempt.whole, known)
    needs, turns = {}, {}
    for number, reserved in attempt.room.items():
        # Beside the instance's share of spans, if it has one: the two lie apart.
        tokens = blocks(number, reserved.tokens)
        if reserved.granted:
            has[number] = tokens + has.get(number, 0)
        else:
            needs[number], turns[number] = tokens, reserved.serial
    if attempt.at is not None:
        has[attempt.at] = max(known, has.get(attempt.at, 0))
        needs[attempt.at] = needs.get(attempt.at, 0) + attempt.asked.left
    has = {number: blocks(number, tokens) for number, tokens in has.items()}
    return KvClaim(attempt.request.id, has, needs, turns, attempt.at is not None and not turns)
