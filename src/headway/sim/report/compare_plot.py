"""Comparison of policies on one workload: distributions of TTFT and of job completion time (JCT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headway.sim.metrics import RequestRecord
from headway.sim.metrics.definitions import ttft_s
from headway.sim.report.load_plot import draw_cdf
from headway.sim.report.style import house_style, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def compare_figure(runs: Mapping[str, Sequence[RequestRecord]], klass: str | None = None) -> Figure:
    """CDFs of TTFT and of JCT (arrival to last token), a line a run; of one class, or of all requests. Requests that
    have not come so far do not count, so a line's end says less the more of them there are."""
    with house_style():
        figure = new_figure(height_in=3.6)
        first, whole = figure.subplots(1, 2)
        chosen = {name: [r for r in records if klass in (None, r.klass)] for name, records in runs.items()}
        waits = {name: [s for r in mine if (s := ttft_s(r)) is not None] for name, mine in chosen.items()}
        ends = {
            name: [r.finish_s - r.arrival_s for r in mine if r.finish_s is not None] for name, mine in chosen.items()
        }
        of = f", {klass}" if klass else ""
        draw_cdf(first, waits, f"time to first token{of}")
        draw_cdf(whole, ends, f"job completion time{of}")
        for axes in (first, whole):
            axes.tick_params(axis="x", labelsize=9)
        whole.legend(loc="lower right", handlelength=2.4)
    return figure
