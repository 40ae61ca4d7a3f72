"""The latencies of one request. Each returns None (or nothing) where the record cannot answer.

TTFT   time to first token: first token - arrival (when the request was due, not when a late client sent it).
TBT    time between tokens: the gaps between consecutive output tokens. A chunk of k tokens is one gap since the token
       before it and k - 1 gaps of zero: the gaps always sum to last - first, and batching tokens does not hide a stall.
TPOT   time per output token: (last token - first token) / (output tokens - 1), the mean TBT; needs two tokens.
E2E    finish - arrival.
queueing delay       first scheduled - arrival; recorded by the simulator, and for servers that report it.
normalised latency   E2E / output tokens.
good   a request is good if it succeeded and met all of its objectives; without objectives, if it succeeded.
"""

from __future__ import annotations

import itertools

from headway.sim.metrics.record import RequestRecord


def ttft_s(record: RequestRecord) -> float | None:
    """Return the time to the first token, seconds."""
    return record.token_s[0] - record.arrival_s if record.token_s else None


def tbt_s(record: RequestRecord) -> list[float]:
    """Return the gaps between consecutive tokens, seconds; empty with fewer than two tokens."""
    return [later - earlier for earlier, later in itertools.pairwise(record.token_s)]


def tpot_s(record: RequestRecord) -> float | None:
    """Return the mean time per output token after the first, seconds."""
    # the server's own count may exceed the chunks that were seen
    tokens = max(record.output_tokens, len(record.token_s))
    if tokens < 2 or not record.token_s:
        return None
    return (record.token_s[-1] - record.token_s[0]) / (tokens - 1)


def e2e_s(record: RequestRecord) -> float | None:
    """Return the time from arrival to finish, seconds."""
    return record.finish_s - record.arrival_s if record.finish_s is not None else None


def queueing_s(record: RequestRecord) -> float | None:
    """Return the time from arrival to first being scheduled, seconds; None where it was not recorded."""
    return record.scheduled_s - record.arrival_s if record.scheduled_s is not None else None


def normalised_latency_s(record: RequestRecord) -> float | None:
    """Return the end-to-end seconds per output token."""
    whole = e2e_s(record)
    return whole / record.output_tokens if whole is not None and record.output_tokens > 0 else None


def is_good(record: RequestRecord) -> bool:
    """Return whether the request succeeded and met every objective that it has.

    An objective that cannot be measured counts as missed (no token came), except that a request of one token has no
    gaps and so no way to miss a TBT or TPOT objective.
    """
    if not record.ok:
        return False
    slo = record.slo
    first, whole = ttft_s(record), e2e_s(record)
    if slo.ttft_s is not None and (first is None or first > slo.ttft_s):
        return False
    # every gap counts, so the worst one decides
    if slo.tbt_s is not None and max(tbt_s(record), default=0.0) > slo.tbt_s:
        return False
    # one token has no TPOT, and so cannot miss it
    if slo.tpot_s is not None and (tpot_s(record) or 0.0) > slo.tpot_s:
        return False
    return slo.e2e_s is None or (whole is not None and whole <= slo.e2e_s)
