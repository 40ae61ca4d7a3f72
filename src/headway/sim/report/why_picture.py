"""Explanation of one request as a picture: its time to first token and its worst gap as strips, with causes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.sim.explanation import LifeInterval, RequestExplanation, merged, shares
from headway.sim.report.plots import BAND, COLOURS, FAINT, INK, house_style, new_figure, save
from headway.sim.report.why_text import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FIXED = {"its own prefill": COLOURS[2], "its own decode": COLOURS[0], "no iteration ran": BAND}
_OTHERS = (COLOURS[1], COLOURS[4], COLOURS[3], COLOURS[5], "#7a5cc4", "#8a6d1f", FAINT)
_MOST_CAUSES = 8
"""Causes with a colour and a line of their own."""
_MOST_MARKED = 60
"""Chunks of the request whose edges are drawn."""


def draw_why(told: RequestExplanation, file: Path) -> list[Path]:
    """Write the picture as PNG or SVG, by the file's name."""
    spans = [("until its first token", told.to_first_token)]
    if told.worst_gap:
        spans.append(("worst gap between tokens", told.worst_gap))
    with house_style():
        figure = new_figure(0.6 + 2.6 * len(spans))
        grid = figure.subplots(2 * len(spans), gridspec_kw={"height_ratios": [1.0, 1.1] * len(spans)})
        for place, (words, intervals) in enumerate(spans):
            _strip(grid[2 * place], grid[2 * place + 1], words, intervals, told.record.arrival_s)
        about = f"{told.record.id}: {told.record.prompt_tokens:,} prompt tokens, policy {told.policy}"
        figure.suptitle(about, x=0.01, ha="left", color=INK)
    return save(figure, file)


def _strip(axis: Axes, below: Axes, words: str, intervals: Sequence[LifeInterval], zero_s: float) -> None:
    """Draw one span of time: a strip of its intervals, and below a legend of the causes with their seconds."""
    causes = shares(intervals)
    colours = _colours(list(causes))
    whole_s = sum(one.seconds for one in intervals)
    for one in intervals:
        # An interval behind several requests has several causes: parts of it by their tokens.
        at_s = one.start_s - zero_s
        for label, seconds in shares([one]).items():
            axis.barh(0, seconds, left=at_s, height=0.8, color=colours.get(label, FAINT), linewidth=0)
            at_s += seconds
    for one in [each for each in merged(intervals) if each.chunk is not None][:_MOST_MARKED]:
        axis.axvline(one.start_s - zero_s, color=INK, linewidth=0.6, ymin=0.1, ymax=0.9)
    for label, seconds in list(causes.items())[:_MOST_CAUSES]:
        text = f"{label}: {duration(seconds)} ({seconds / whole_s:.0%})"
        axis.barh(0, 0, color=colours[label], label=text)
    rest = list(causes.values())[_MOST_CAUSES:]
    if rest:
        axis.barh(0, 0, color=FAINT, label=f"{len(rest)} further causes: {duration(sum(rest))}")
    axis.set_title(f"{duration(whole_s)} {words}")
    axis.set_yticks([])
    axis.set_ylim(-0.5, 0.5)
    axis.grid(False)
    axis.spines["left"].set_visible(False)
    axis.set_xlim(intervals[0].start_s - zero_s, intervals[-1].end_s - zero_s)
    axis.set_xlabel("seconds after its arrival")
    below.axis("off")
    below.legend(*axis.get_legend_handles_labels(), loc="upper left", ncols=2, fontsize=9, borderaxespad=0.0)


def _colours(causes: Sequence[str]) -> dict[str, str]:
    """Return the colour of each of the largest causes."""
    free = iter(_OTHERS)
    return {label: _FIXED.get(label) or next(free, FAINT) for label in causes[:_MOST_CAUSES]}
