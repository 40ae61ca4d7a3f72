"""The house look: Okabe-Ito colours (safe for colour-blind readers), few lines, text large enough at README width."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import ConfigError
from headway.core.output_file import check_outputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
INK = "#222222"
FAINT = "#8a8a8a"
BAND = "#e9e9ec"
WIDTH_IN = 9.0

_RC: dict[str, Any] = {
    "font.size": 11,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "svg.hashsalt": "headway",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Apply the house style to figures made inside; matplotlib's settings are restored afterwards."""
    import matplotlib as mpl

    with mpl.rc_context(_RC):  # type: ignore[arg-type]
        yield


def new_figure(height_in: float) -> Figure:
    """Return an empty figure of README width, without pyplot's global state (nothing to close, safe in threads)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_picture(file: Path | None) -> list[Path]:
    """Return the files that `save` writes for a name; their folders are made. None: none.

    Called before the work whose picture it is. Raises ConfigError where it cannot be drawn or written.
    """
    if file is None:
        return []
    if find_spec("matplotlib") is None:
        raise ConfigError(f"cannot draw {file}: there is no matplotlib here; pip install 'headway[plot]'")
    if file.suffix.lower() not in ("", ".png", ".svg", ".pdf"):
        raise ConfigError(f"cannot draw {file}: its name must end in .png, .svg or .pdf, or have no suffix (both)")
    files = [file] if file.suffix else [file.with_suffix(".png"), file.with_suffix(".svg")]
    check_outputs(*files)
    return files


def save(figure: Figure, file: Path) -> list[Path]:
    """Write a figure as `.png`, `.svg` or `.pdf`, or as the first two where the name has no suffix.

    Returns the files written. Raises ConfigError as `check_picture` does.
    """
    files = check_picture(file)
    with house_style():
        for target in files:
            metadata = {"Date": None} if target.suffix.lower() == ".svg" else None
            figure.savefig(target, metadata=metadata)
    return files
