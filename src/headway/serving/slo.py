"""The latency a client asks for, by header or body, clamped to what the operator allows.

Headers win over the body; of the headers the canonical spelling wins over its alias. Clients set deadlines for
themselves, at the cost of others: that is why the limits are the server's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from headway.core.errors import RequestError
from headway.core.request import Slo
from headway.serving.body_fields import BodyFields, check_number
from headway.serving.settings import ServerSettings

TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
_LONGEST_MS = 1e12


def read_slo(headers: Mapping[str, str], fields: BodyFields, settings: ServerSettings) -> Slo:
    """Seconds, within the settings' limits; None where the client asks for nothing. Raises RequestError by name."""
    body = fields.get("slo")
    if body is None:
        body = {}
    if not isinstance(body, dict):
        raise RequestError("'slo' must be an object with 'ttft_ms' and 'tpot_ms'", "slo")
    ttft = _from_headers(headers, TTFT_HEADERS)
    tpot = _from_headers(headers, TPOT_HEADERS)
    asked_ttft, asked_tpot = _from_body(body, "ttft_ms"), _from_body(body, "tpot_ms")
    return Slo(
        ttft_s=_clamp(asked_ttft if ttft is None else ttft, settings.slo_min_ttft_s, settings.slo_max_ttft_s),
        tbt_s=_clamp(asked_tpot if tpot is None else tpot, settings.slo_min_tbt_s, settings.slo_max_tbt_s),
    )


def _from_headers(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = headers.get(name)
        if value is None:
            continue
        try:
            number = float(value[:40])
        except ValueError:
            number = math.nan
        if not 0 < number <= _LONGEST_MS:
            raise RequestError(f"header '{name}' must be a number of milliseconds above 0", name)
        return number
    return None


def _from_body(body: Mapping[str, object], key: str) -> float | None:
    value = body.get(key)
    return None if value is None else check_number(value, f"slo.{key}", 0, _LONGEST_MS, above_low=True)


def _clamp(ms: float | None, low_s: float, high_s: float) -> float | None:
    return None if ms is None else min(max(ms / 1000.0, low_s), high_s)
