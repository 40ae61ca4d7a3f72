"""Latency targets of a request, from `vllm_xargs` of its body; the middleware puts headers there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headway.core.request import Slo

TTFT_ARGUMENT, TPOT_ARGUMENT = "slo_ttft_ms", "slo_tpot_ms"
HEADERS = {
    b"x-llm-d-slo-ttft-ms": TTFT_ARGUMENT,
    b"x-slo-ttft-ms": TTFT_ARGUMENT,
    b"x-llm-d-slo-tpot-ms": TPOT_ARGUMENT,
    b"x-slo-tpot-ms": TPOT_ARGUMENT,
}
"""Argument by header. Of two headers of one argument the first in this table wins."""
_LONGEST_MS = 1e12


def milliseconds(value: object) -> float | None:
    """The value as a number of milliseconds above 0; None where it is not one."""
    try:
        number = float(value[:40] if isinstance(value, str | bytes) else value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and 0 < number <= _LONGEST_MS else None


def read_slo(extra_args: Mapping[str, Any] | None) -> Slo:
    """What a request's `sampling_params.extra_args` ask for. Values that are not times are ignored: a scheduler has no
    way to refuse a request."""
    if not extra_args:
        return Slo()
    ttft = milliseconds(extra_args.get(TTFT_ARGUMENT))
    tpot = milliseconds(extra_args.get(TPOT_ARGUMENT))
    return Slo(ttft_s=None if ttft is None else ttft / 1000, tbt_s=None if tpot is None else tpot / 1000)
