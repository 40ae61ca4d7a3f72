"""Why a request came late, as text, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.sim.explanation import CounterfactualOutcome, LifeInterval, RequestExplanation, merged, shares
from headway.sim.metrics import RequestRecord
from headway.sim.replay import ReplayedChunk
from headway.sim.report.plots import BAND, COLOURS, FAINT, INK, house_style, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SCHEMA = "headway.why/1"
_MOST_NAMES = 4
"""Others named in a line; the rest are counted."""
_MOST_LINES = 40
"""Intervals shown of a span; the rest are summed up."""


def why_json(told: RequestExplanation, counterfactuals: Sequence[CounterfactualOutcome] = ()) -> dict[str, Any]:
    """Return an explanation as plain data, times in seconds."""
    record = told.record
    return {
        "schema": SCHEMA,
        "request": record.id,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": told.cached_tokens,
        "output_tokens": record.output_tokens,
        "policy": told.policy,
        "arrival_s": record.arrival_s,
        "ttft_s": told.ttft_s,
        "error": record.error,
        "rejected": record.rejected,
        "aim_s": told.aim_s,
        "preemptions": told.preemptions,
        "causes_of_ttft": shares(told.to_first_token),
        "intervals": [_plain(one, record.arrival_s) for one in told.to_first_token],
        "worst_gap_s": _seconds(told.worst_gap) if told.worst_gap else None,
        "causes_of_worst_gap": shares(told.worst_gap),
        "worst_gap": [_plain(one, record.arrival_s) for one in told.worst_gap],
        "counterfactuals": [msgspec.to_builtins(one) for one in counterfactuals],
    }


def why_of(data: dict[str, Any]) -> tuple[RequestExplanation, list[CounterfactualOutcome]]:
    """Return what `why_json` was made of, as far as text and picture need it. Raises KeyError or TypeError for other
    data."""
    zero_s, ttft_s = data["arrival_s"], data["ttft_s"]
    record = RequestRecord(
        id=data["request"],
        klass="",
        arrival_s=zero_s,
        prompt_tokens=data["prompt_tokens"],
        output_tokens=data["output_tokens"],
        token_s=() if ttft_s is None else (zero_s + ttft_s,),
        error=data["error"],
        rejected=data["rejected"],
    )
    told = RequestExplanation(
        record=record,
        cached_tokens=data["cached_tokens"],
        policy=data["policy"],
        to_first_token=tuple(_interval(one, zero_s) for one in data["intervals"]),
        worst_gap=tuple(_interval(one, zero_s) for one in data["worst_gap"]),
        preemptions=data["preemptions"],
        aim_s=data["aim_s"],
    )
    return told, [
        CounterfactualOutcome(**{**one, "extrapolated": tuple(one.get("extrapolated", ()))})
        for one in data["counterfactuals"]
    ]


def why_text(told: RequestExplanation, counterfactuals: Sequence[CounterfactualOutcome] = ()) -> str:
    """Return an explanation as lines for a terminal."""
    record = told.record
    cached = f", {told.cached_tokens} of them cached" if told.cached_tokens else ""
    lines = [f"{record.id}: prompt of {record.prompt_tokens} tokens{cached}, {record.output_tokens} tokens of output"]
    if record.rejected:
        return "\n".join([*lines, f"It was not taken on, {record.error}"])
    if told.ttft_s is None:
        lines.append(f"No first token: {record.error}. Until the end of the log it spent")
    else:
        aim = "by the machine" if told.aim_s is None else duration(told.aim_s)
        lines.append(f"First token after {duration(told.ttft_s)} (policy {told.policy}, aim {aim}):")
    lines += _table(told.to_first_token)
    lines += ["", "From its arrival:", *_life(told.to_first_token, record.arrival_s)]
    if told.worst_gap:
        lines += ["", f"Worst gap between tokens {duration(_seconds(told.worst_gap))}:", *_table(told.worst_gap)]
        lines += _life(told.worst_gap, record.arrival_s)
    if told.preemptions:
        lines += ["", f"Its KV was freed {told.preemptions} times and computed again."]
    if counterfactuals:
        lines += ["", "Simulated with the same requests:"]
        lines += [f"  {one.setting:<24} {_outcome(one)}" for one in counterfactuals]
    return "\n".join(lines)


def _outcome(one: CounterfactualOutcome) -> str:
    first = "no first token" if one.ttft_s is None else f"first token after {duration(one.ttft_s)}"
    text = first if one.worst_gap_s is None else f"{first}, worst gap {duration(one.worst_gap_s)}"
    return f"{text} (extrapolated: {'; '.join(one.extrapolated)})" if one.extrapolated else text


def _table(intervals: Sequence[LifeInterval]) -> list[str]:
    whole = _seconds(intervals)
    found = shares(intervals)
    shown = list(found.items())[:8]
    rest = sum(found.values()) - sum(seconds for _, seconds in shown)
    if len(found) > len(shown):
        shown.append((f"{len(found) - len(shown)} further causes", rest))
    return [f"  {duration(seconds):>10}  {seconds / whole if whole else 0:4.0%}  {label}" for label, seconds in shown]


def _life(intervals: Sequence[LifeInterval], zero_s: float) -> list[str]:
    joined = merged(intervals)
    lines = [
        f"  +{one.start_s - zero_s:.3f} s  {duration(one.seconds):>9}  {_words(one)}" for one in joined[:_MOST_LINES]
    ]
    if len(joined) > _MOST_LINES:
        lines.append(
            f"  … {len(joined) - _MOST_LINES} more, {duration(_seconds(joined[_MOST_LINES:]))} (all with --json)"
        )
    return lines


def _words(one: LifeInterval) -> str:
    count = f"{len(one.steps)} iterations" if len(one.steps) > 1 else "iteration"
    beside = _beside(one)
    match one.cause:
        case "engine":
            return "no iteration ran"
        case "KV transfer":
            return f"its KV on the way {one.rule}"
        case "under way":
            return f"the iteration under way{beside and f': {beside}'}"
        case "own chunk":
            assert one.chunk is not None
            chunk = one.chunk
            chunks = f"{len(one.steps)} chunks, together" if len(one.steps) > 1 else "chunk of"
            left = f"{chunk.tokens} tokens from {chunk.start}, {chunk.remaining} left"
            own = f"{chunks} {left}; bound by: {chunk.limit}"
            return f"{own}{beside and f'; beside {beside}'}"
        case "own token":
            return f"{count} with it{beside and f', beside {beside}'}"
        case "no KV":
            return f"{one.rule or 'no free KV blocks'}; {count} of {beside or 'nothing'}"
        case "computed again":
            return f"its KV was freed; {count} of {beside or 'nothing'}"
        case _:
            return f"queued behind {beside or 'nothing'} ({count}{one.rule and f'; {one.rule}'})"


def _beside(one: LifeInterval) -> str:
    names = [f"{name} ({tokens} tokens)" for name, tokens in one.beside[:_MOST_NAMES]]
    if len(one.beside) > _MOST_NAMES:
        names.append(f"{len(one.beside) - _MOST_NAMES} more prompts")
    if one.decodes:
        names.append(f"{one.decodes} decode{'s' if one.decodes > 1 else ''}")
    return ", ".join(names)


def _plain(one: LifeInterval, zero_s: float) -> dict[str, Any]:
    chunk = one.chunk
    return {
        "cause": one.cause,
        "after_s": one.start_s - zero_s,
        "seconds": one.seconds,
        "iterations": list(one.steps),
        "chunk": None if chunk is None else dict(chunk._asdict()),
        "beside": [{"request": name, "tokens": tokens} for name, tokens in one.beside],
        "decodes": one.decodes,
        "rule": one.rule,
    }


def _interval(plain: dict[str, Any], zero_s: float) -> LifeInterval:
    """The reverse of `_plain`."""
    start_s, chunk = zero_s + plain["after_s"], plain["chunk"]
    return LifeInterval(
        cause=plain["cause"],
        start_s=start_s,
        end_s=start_s + plain["seconds"],
        steps=tuple(plain["iterations"]),
        chunk=None if chunk is None else ReplayedChunk(**chunk),
        beside=tuple((one["request"], one["tokens"]) for one in plain["beside"]),
        decodes=plain["decodes"],
        rule=plain["rule"],
    )


def _seconds(intervals: Sequence[LifeInterval]) -> float:
    return sum(one.seconds for one in intervals)


def duration(seconds: float) -> str:
    """Return a duration as milliseconds, or as seconds from ten of them on."""
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


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
