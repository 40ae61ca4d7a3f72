"""Short forms of numbers for tables and axes: 45 ms, 7.9 s, 33K."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """Format seconds in two to three significant digits: 0.0452 → `45 ms`, 7.91 → `7.9 s`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        ms = seconds * 1000
        return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def tokens(count: float) -> str:
    """Format a count of tokens: 32768 → `32.8K`, 1_000_000 → `1M`, 200 → `200`."""
    if count >= 999_500:
        return f"{count / 1e6:.3g}M"
    return f"{count / 1e3:.3g}K" if count >= 10_000 else f"{count:,.0f}"


def number(value: float | None, digits: int = 1) -> str:
    """Format a plain number; `-` for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def tick(seconds: float) -> str:
    """Format an axis label: `30 ms`, `1 s`, without trailing zeros."""
    return f"{seconds * 1000:g} ms" if seconds < 1 else f"{seconds:g} s"
