"""The papers: titles, headline claims, and the page that `headway reproduce PAPER` prints from the record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import shorten

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from headway_research.recorded import RecordedRow, cause_of, in_words, recorded, totals
from headway_research.registry import EXPERIMENTS


@dataclass(frozen=True)
class Paper:
    """One paper and where its headline claims are judged."""

    name: str
    """Beginning of its experiments' ids."""
    title: str
    where: str
    """Venue, or how it can be found."""
    headlines: tuple[tuple[str, str], ...]
    """(id, beginning of the claim) of the rows for the claims of abstract and introduction."""
    page: str
    """Its page in the documentation, which has the picture."""

    @property
    def ids(self) -> list[str]:
        return [name for name in EXPERIMENTS if name.partition(".")[0] == self.name]

    def rows(self) -> Iterator[tuple[str, RecordedRow]]:
        """Yield (id, row) of the headline claims, as far as they are recorded."""
        for name, start in self.headlines:
            for row in recorded()[name].rows if name in recorded() else ():
                if row.claim.startswith(start):
                    yield name, row


PAPERS: dict[str, Paper] = {
    paper.name: paper
    for paper in (
        Paper(
            "medha",
            "No Request Left Behind: Tackling Heterogeneity in Long-Context LLM Inference with Medha",
            "Agrawal et al., arXiv 2409.17264",
            (
                ("medha.headlines", "Capacity with 5% long"),
                ("medha.headlines", "Throughput over LoongServe's"),
                ("medha.fig1", "LoongServe over Medha, median TTFT at 5% long"),
                ("medha.fig1", "LoongServe over Medha, P90 TTFT at 5% long"),
                ("medha.fig1", "Medha's P90 TTFT at 5% long"),
                ("medha.fig3b", "Attention of 32-token chunks"),
                ("medha.fig5b", "1M tokens on 128 H100s: context parallelism over SPP"),
                ("medha.deadlines", "Gain of multi-prefill batching by the deadline"),
            ),
            "docs/papers/medha.md",
        ),
        Paper(
            "mnemosyne",
            "Mnemosyne: Parallelization Strategies for Efficiently Serving Multi-Million Context Length LLM Inference "
            "Requests Without Approximations",
            "Agrawal et al., arXiv 2409.17264, first version",
            (
                ("mnemosyne.headlines", "8B, 10M tokens, 4 KV groups on 128 H100s: TBT"),
                ("mnemosyne.headlines", "8B, 2M tokens on 128 H100s: TTFT"),
                ("mnemosyne.headlines", "8B on 8 H100s: prefill of 1M tokens in chunks of 32"),
                ("mnemosyne.fig14", "1M tokens on 128 H100s: context parallelism over SPP"),
                ("mnemosyne.fig15", "llama-3-8b: scaling efficiency"),
                ("mnemosyne.fig17", "8B, 10M tokens: four KV groups"),
                ("mnemosyne.fig13", "Overhead of vLLM an iteration"),
            ),
            "docs/papers/medha.md",
        ),
        Paper(
            "tetris",
            "Tetris: Optimizing Long-context LLM Serving via Fine-grained Sequence Parallelism",
            "Li et al., ISCA 2026",
            (
                ("tetris.fig8", "8B, short: Tetris over Fixed-SP8 at 25×"),
                ("tetris.fig8", "8B, medium: Tetris over Fixed-SP8 at 25×"),
                ("tetris.fig8", "8B, long: Tetris over Fixed-SP8 at 25×"),
                ("tetris.fig9", "8B, short"),
                ("tetris.fig13", "8B, medium: single-chunk P50"),
                ("tetris.chunking-bound", ""),
                ("tetris.loongserve", "8B, medium, 2/s: median TPOT"),
            ),
            "docs/papers/tetris.md",
        ),
        Paper(
            "pecsched",
            "PecSched: Preemptive and Efficient Cluster Scheduling for LLM Inference",
            "Zhang and Shen, University of Virginia",
            (("pecsched.headlines", ""),),
            "docs/papers/pecsched.md",
        ),
        Paper(
            "packing-prefetch",
            "Architecting Long-Context LLM Acceleration with Packing-Prefetch Scheduler and Ultra-Large Capacity "
            "On-Chip Memories",
            "Lee et al., submitted to IEEE Micro",
            (
                ("packing-prefetch.case1", "Decode speed-up, 2048 prefill and 128K KV tokens, prefetch"),
                ("packing-prefetch.case1", "Overall speed-up, 512 and 16K, prefetch"),
                ("packing-prefetch.case3", "Gain in QPS"),
                ("packing-prefetch.case3", "HBM bandwidth"),
            ),
            "docs/papers/accelerator.md",
        ),
    )
}


def page(paper: Paper) -> RenderableType:
    """Return a paper's page: its headline claims beside what was found, then its sums."""
    table = Table(title=escape(f"{paper.title}\n{paper.where}"), title_justify="left", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), expand=True)  # fmt: skip
    for head, ratio in (("headline claim", 6), ("paper", 4), ("here", 4), ("verdict", 3)):
        table.add_column(head, ratio=ratio)
    for name, row in paper.rows():
        colour = {"holds": "green", "fails": "red"}.get(row.state, "yellow")
        verdict = row.state if row.state != "fails" else f"fails: {_cause(name, row)}"
        cells = (shorten(text, 110, placeholder=" …") for text in (row.claim, row.paper or "-", row.found))
        table.add_row(*map(escape, cells), f"[{colour}]{verdict}[/{colour}] ({row.kind})", end_section=True)
    note = f"All: `headway reproduce --list`; one figure: `headway reproduce {paper.ids[0]}`; {paper.page}."
    return Group(escape(in_words(totals(paper.ids))), table, escape(note))


def _cause(name: str, row: RecordedRow) -> str:
    cause = cause_of(name, row.claim)
    if cause is None:
        return "not explained"
    return cause.cause if cause.shown is None else f"{cause.cause}, see {cause.shown[0]}"
