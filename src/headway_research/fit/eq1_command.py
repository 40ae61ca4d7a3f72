"""`headway profile fit-eq1 FILE --out FILE`: fit Tetris's Eq. (1) to measured prefill times of SP groups.

FILE is a CSV with the columns sp, past, tokens, seconds (a measurement a row; without `past`: no history), the log of a
cluster (`headway cluster --event-log FILE`) for its own groups, or the word table1 for Tetris's own measurements.
Relative weights: short prompts count as much as long ones.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.errors import ConfigError
from headway.core.files import read_input, write_output

if TYPE_CHECKING:
    from headway.perf.latency.eq1 import PrefillSample
    from headway.sim.replay import ClusterLogRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="CSV of sp, past, tokens, seconds; a cluster's log; or table1")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write the fit (JSON)")


def run(arguments: argparse.Namespace) -> int:
    import msgspec

    from headway.perf.latency import eq1

    samples = eq1.table1_samples() if arguments.file == "table1" else _samples(Path(arguments.file))
    found = eq1.fit(samples)
    errors = eq1.errors(found, samples)
    history = any(s.past for s in samples)
    words = f"Eq. (1) fitted to {len(samples)} measurements of {arguments.file}"
    words += "" if history else "; no history measured: c = 2d"
    file = eq1.Eq1File(source=words, sizes=found.sizes, errors=errors)
    write_output(arguments.out, msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
    print(words)
    print(f"{'SP':>4} {'a (s)':>9} {'b (us)':>9} {'c (ns)':>9} {'d (ns)':>9} {'worst':>7} {'mean':>7}")
    for sp, c in found.sizes.items():
        worst, mean = errors[sp]
        numbers = f"{c.a:>9.4f} {c.b * 1e6:>9.3f} {c.c * 1e9:>9.4f} {c.d * 1e9:>9.4f}"
        print(f"{sp:>4} {numbers} {worst:>7.1%} {mean:>7.1%}")
    print(f"written to {arguments.out}")
    return 0


def _samples(path: Path) -> list[PrefillSample]:
    from headway.sim.replay import is_cluster_log, read_cluster

    if not is_cluster_log(path):
        return _read(path)
    samples = prefill_samples(read_cluster(path))
    lengths: dict[int, set[tuple[int, int]]] = {}
    for sample in samples:
        lengths.setdefault(sample.sp, set()).add((sample.past, sample.tokens))
    # a log has what its traffic happened to need; a CSV was measured for the purpose, and its gaps are errors
    enough = {sp for sp, found in lengths.items() if len(found) >= 4}
    if not enough:
        raise ConfigError(
            f"{path}: on no group size did spans of four different lengths run from begin to end alone: serve more "
            "prompts, of more lengths"
        )
    return [sample for sample in samples if sample.sp in enough]


def _read(path: Path) -> list[PrefillSample]:
    from headway.perf.latency.eq1 import PrefillSample

    try:
        rows = list(csv.DictReader(read_input(path).decode().splitlines()))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a CSV file: {error}") from error
    if not rows or not {"sp", "tokens", "seconds"} <= set(rows[0]):
        raise ConfigError(f"{path} needs the columns sp, tokens and seconds (and past, where there is history)")
    samples = []
    # Line 1 has the names of the columns.
    for number, row in enumerate(rows, 2):
        try:
            samples.append(
                PrefillSample(int(row["sp"]), int(row.get("past") or 0), int(row["tokens"]), float(row["seconds"]))
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    return samples


def prefill_samples(run: ClusterLogRun) -> list[PrefillSample]:
    """Return what spans took on their groups: of those that ran whole and alone, neither paused nor stopped."""
    from headway.perf.latency.eq1 import PrefillSample

    alone = Counter((span.request, span.start) for span in run.spans)
    batches = Counter((span.group, span.start_s) for span in run.spans)
    return [
        PrefillSample(len(span.group), span.start, span.end - span.start, span.end_s - span.start_s)
        for span in run.spans
        if alone[span.request, span.start] == 1
        and batches[span.group, span.start_s] == 1
        and (life := run.requests.get(span.request)) is not None
        and life.error is None
        and span.end_s > span.start_s
    ]
