"""Draw docs/figures/parts.svg and docs/figures/request.svg, the diagrams of docs/architecture.md. Seconds.

The same input gives the same bytes, so that a change of a diagram shows in review.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
BLUE, GREEN, GREY, ORANGE = "#dbe9f6", "#dff0d8", "#eeeeee", "#fbe5cc"

Box = tuple[float, float, float, float, str, str]
"""x, y, width, height in units of the drawing, text, colour."""
Arrow = tuple[str, str, str]
"""Name of a box, name of a box, text beside the arrow."""


def main() -> int:
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "headway", "font.family": "sans-serif", "font.size": 9}
    )
    draw("parts", (11.5, 9.3), PARTS, PARTS_ARROWS)
    draw("request", (11.5, 5.6), REQUEST, REQUEST_ARROWS)
    return 0


PARTS: dict[str, Box] = {
    "clients": (0.0, 6.6, 2.4, 0.7, "OpenAI clients", GREY),
    "serving": (0.0, 5.0, 2.4, 1.1, "serving\nHTTP, tokeniser,\nstreams, journal", BLUE),
    "engine": (3.4, 5.0, 2.6, 1.1, "runtime.engine\nloop: schedule →\nexecute → update", BLUE),
    "executor": (7.0, 5.0, 2.6, 1.1, "runtime.executor\none process, or\nranks of many", BLUE),
    "model": (10.4, 5.0, 2.6, 1.1, "runtime.model\nruntime.attention", BLUE),
    "live": (0.0, 3.1, 2.4, 1.1, "runtime.cluster\nlive controller,\ninstance agents", BLUE),
    "scheduler": (3.4, 3.1, 2.6, 1.1, "policy.iteration\nwhat one instance\ndoes next", GREEN),
    "kv": (7.0, 3.1, 2.6, 1.1, "kv\nblock manager,\nstaged KV", GREEN),
    "transfer": (10.4, 3.1, 2.6, 1.1, "runtime.kv_transfer\nruntime.sequence_\nparallel", BLUE),
    "controller": (0.0, 1.3, 2.4, 1.1, "control\ncontroller, queues,\ntransfers, replay", GREEN),
    "placement": (3.4, 1.3, 2.6, 1.1, "policy.placement\nwhere a span goes", GREEN),
    "latency": (7.0, 1.3, 2.6, 1.1, "perf.latency\nhow long a batch takes", GREEN),
    "sim": (10.4, 1.3, 2.6, 1.1, "sim\nvirtual time, workload,\nmetrics, reports", ORANGE),
    "api": (10.4, 6.6, 2.6, 0.7, "cli · api", ORANGE),
    "vllm": (0.0, -0.5, 2.4, 1.1, "vllm\nplug-in of\nvLLM's scheduler", BLUE),
    "hosted": (3.4, -0.5, 2.6, 1.1, "policy.hosted\npolicy.iteration in a\nhost engine's scheduler", GREEN),
    "planning": (10.4, -0.5, 2.6, 1.1, "planning\ncheapest deployment\nthat meets demands", ORANGE),
}
PARTS_ARROWS: list[Arrow] = [
    ("clients", "serving", ""),
    ("serving", "engine", "requests"),
    ("engine", "executor", "batches"),
    ("executor", "model", ""),
    ("serving", "live", "in a cluster"),
    ("engine", "scheduler", ""),
    ("scheduler", "kv", ""),
    ("live", "controller", "events"),
    ("controller", "placement", "events"),
    ("placement", "latency", ""),
    ("scheduler", "latency", ""),
    ("executor", "transfer", ""),
    ("sim", "latency", ""),
    ("vllm", "hosted", "steps"),
    ("hosted", "latency", ""),
    ("planning", "sim", ""),
]

REQUEST: dict[str, Box] = {
    "http": (0.0, 3.9, 2.5, 0.9, "serving.app, serving.jobs\nread, tokenise, refuse", BLUE),
    "journal": (0.0, 2.4, 2.5, 0.9, "serving.journal\nwritten before it is sent", BLUE),
    "client": (3.5, 3.9, 2.5, 0.9, "runtime.engine.client\none message, one frame", BLUE),
    "controller": (3.5, 2.4, 2.5, 0.9, "control.controller\n+ policy.placement\ninstance, spans, KV", GREEN),
    "core": (7.0, 3.9, 2.5, 0.9, "runtime.engine.core\nadmit, end, time-outs", BLUE),
    "scheduler": (7.0, 2.4, 2.5, 0.9, "policy.iteration.scheduler\norder, chunk, KV blocks", GREEN),
    "executor": (10.5, 3.9, 2.5, 0.9, "runtime.executor.worker\nrows into one pass", BLUE),
    "model": (10.5, 2.4, 2.5, 0.9, "runtime.model.decoder\nruntime.attention\nruntime.model.sampling", BLUE),
    "stream": (
        3.5,
        0.9,
        6.0,
        0.9,
        "serving.text, serving.transport\ntokens to text, stop strings, stream",
        BLUE,
    ),
}
REQUEST_ARROWS: list[Arrow] = [
    ("http", "client", "1"),
    ("http", "journal", ""),
    ("client", "controller", "cluster"),
    ("client", "core", "2"),
    ("core", "scheduler", "3 schedule"),
    ("core", "executor", "4 batch"),
    ("executor", "model", "5"),
    ("model", "stream", "6 tokens"),
]


def draw(name: str, size: tuple[float, float], boxes: dict[str, Box], arrows: list[Arrow]) -> None:
    figure, axes = plt.subplots(figsize=size)
    for x, y, width, height, text, colour in boxes.values():
        style = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.06", facecolor=colour, edgecolor="#555555")
        axes.add_patch(style)
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center")
    for start, end, text in arrows:
        connect(axes, boxes[start], boxes[end], text)
    axes.set_xlim(-0.3, 13.3)
    axes.set_ylim(min(box[1] for box in boxes.values()) - 0.4, max(box[1] + box[3] for box in boxes.values()) + 0.3)
    axes.axis("off")
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURES / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def connect(axes: Axes, start: Box, end: Box, text: str) -> None:
    """An arrow from edge to edge: sideways between columns of one row, up or down otherwise."""
    (x1, y1, w1, h1), (x2, y2, w2, h2) = start[:4], end[:4]
    if abs(y1 - y2) < 0.5:
        right = x2 > x1
        tail = (x1 + w1 + 0.08 if right else x1 - 0.08, y1 + h1 / 2)
        head = (x2 - 0.08 if right else x2 + w2 + 0.08, y2 + h2 / 2)
        place, align = ((tail[0] + head[0]) / 2, tail[1] + 0.12), "center"
    else:
        down = y2 < y1
        wide = w2 > 2 * w1  # enter a wide box at the end that is nearer
        tail = (x1 + w1 / 2, y1 - 0.08 if down else y1 + h1 + 0.08)
        head = (x2 + w2 - 0.8 if wide else x2 + w2 / 2, y2 + h2 + 0.08 if down else y2 - 0.08)
        # Beside an arrow to the left, text stands below it.
        aside = -0.22 if head[0] < tail[0] - 0.5 else 0.0
        place, align = ((tail[0] + head[0]) / 2 + 0.08, (tail[1] + head[1]) / 2 + aside), "left"
    axes.annotate("", xy=head, xytext=tail, arrowprops={"arrowstyle": "-|>", "color": "#333333", "linewidth": 1.1})
    axes.text(*place, text, ha=align, va="center", fontsize=8, color="#333333")


if __name__ == "__main__":
    sys.exit(main())
