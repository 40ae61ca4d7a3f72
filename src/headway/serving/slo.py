"""Latency targets of a request, from headers or body, clamped to the operator's limits.

Headers win over the body; of the headers the canonical name wins over its alias. A tight target of one client delays
the requests of others, so the operator limits how tight it may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from headway.core.errors import RequestError
from headway.core.request import Slo
from headway.serving.request_bodies import SloBody
from headway.serving.settings import ServerSettings

TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
REFUSE_HEADER = "x-slo-refuse-late"
_LONGEST_MS = 1e12


def read_slo(headers: Mapping[str, str], body: SloBody | None, settings: ServerSettings) -> Slo:
    """Return the targets in seconds, within the settings' limits; None where the client asks for nothing.

    Raises RequestError that names the header.
    """
    ttft_ms, tpot_ms = _from_headers(headers, TTFT_HEADERS), _from_headers(headers, TPOT_HEADERS)
    refuse_late = _flag(headers)
    if body is not None:
        refuse_late = body.refuse_late if refuse_late is None else refuse_late
        ttft_ms = body.ttft_ms if ttft_ms is None else ttft_ms
        tpot_ms = body.tpot_ms if tpot_ms is None else tpot_ms
    if refuse_late and ttft_ms is None:
        raise RequestError("'slo.refuse_late' needs a time to first token: add 'ttft_ms'", "slo")
    return Slo(
        ttft_s=_clamp(ttft_ms, settings.slo_min_ttft_s, settings.slo_max_ttft_s),
        tbt_s=_clamp(tpot_ms, settings.slo_min_tbt_s, settings.slo_max_tbt_s),
        refuse_late=bool(refuse_late),
    )


def _flag(headers: Mapping[str, str]) -> bool | None:
    """Return whether a late request is to be refused; None: the header is not there."""
    value = headers.get(REFUSE_HEADER)
    if value is None:
        return None
    if value.lower() not in ("true", "false", "1", "0"):
        raise RequestError(f"header '{REFUSE_HEADER}' must be true or false", REFUSE_HEADER)
    return value.lower() in ("true", "1")


def _from_headers(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = headers.get(name)
        # The next name is an alias of the first.
        if value is None:
            continue
        try:
            # nan fails the range check below, and so does a header that is no number.
            number = float(value[:40])
        except ValueError:
            number = math.nan
        if not 0 < number <= _LONGEST_MS:
            raise RequestError(f"header '{name}' must be a number of milliseconds above 0", name)
        return number
    return None


def _clamp(ms: float | None, low_s: float, high_s: float) -> float | None:
    return None if ms is None else min(max(ms / 1000.0, low_s), high_s)
