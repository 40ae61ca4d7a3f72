"""What `headway why` says of live convoys, against the clock and against what serving them under FCFS gives.

    python -m benchmarks.counterfactual [--threads 1] [--json out.json]

Servers of the embedded model, one with Headway's defaults and two of FCFS (by adaptive chunks; whole prompts), get the
same convoys by turns, so that what else the machine does meets all alike: a document, and chats at fixed times while it
is computed. Causes are summed for each request of all. Then the log of the defaults alone is simulated under FCFS, and
its times to first token are compared with those that FCFS's servers measured, by class; "as it ran" is compared with
the log itself, and the servers' convoys with each other, so that it is seen what the machine alone moves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from headway.runtime.embedded import model_path
from headway.serving.load.client import LoadClient, LoadRequest, TargetEndpoint
from headway.serving.load.convoy import ConvoyPlan, PromptSource, random_prompts
from headway.serving.load.endpoint import first_model
from headway.serving.load.machine import machine
from headway.serving.load.open_loop import run_open_loop
from headway.serving.load.prompts import vocab_size_of
from headway.serving.load.server_process import ServerProcess
from headway.sim.calibration import simulate_again
from headway.sim.counterfactual import with_setting
from headway.sim.explanation import explain
from headway.sim.metrics import RequestRecord
from headway.sim.metrics.definitions import ttft_s
from headway.sim.replay import read_log, replay
from headway.sim.replayed_run import ReplayedRun

UNDER = {
    "fcfs": ["--scheduling-policy", "fcfs"],
    "fcfs,chunking=whole": ["--scheduling-policy", "fcfs", "--chunking", "whole"],
}
"""What `headway why --under` takes, and the same for `headway serve`."""
CHATS = 8
"""Beside each document; the last one comes before the document would be computed, alone."""
CLASSES = ("document", "chat")
WITHIN = 0.15
"""Largest relative error of a class's median that is accepted."""
WITHIN_S = 1e-3
"""Largest difference that is accepted between a request's time to first token and the sum of its causes."""


@dataclass(frozen=True)
class Row:
    """Medians of the times to first token of a class, seconds."""

    under: str
    klass: str
    simulated_s: float
    served_s: float
    convoys_s: list[float]
    """Of the served, one for each convoy."""

    @property
    def error(self) -> float:
        return abs(self.simulated_s / self.served_s - 1)


def convoy(prompts: PromptSource, number: int, every_s: float) -> Iterator[LoadRequest]:
    """Yield a document at zero, and chats every so many seconds after it."""
    yield replace(prompts.long(), id=f"document-{number}", klass=CLASSES[0])
    for i in range(CHATS):
        due_s = every_s * (i + 1)
        yield replace(prompts.short(), id=f"chat-{number}-{i}", klass=CLASSES[1], due_s=due_s)


async def serve(urls: Sequence[str], plan: ConvoyPlan) -> None:
    """Send the convoys to each server by turns."""
    prompts = random_prompts(plan, vocab_size_of(str(model_path())) or 256)
    clients = [LoadClient(TargetEndpoint(base_url=url, model=str(first_model(url, None)["id"]))) for url in urls]
    alone_s = []
    for client in clients:
        async with client:
            warm = [replace(prompts.short(), id="warm-short"), replace(prompts.long(), id="warm-long")]
            alone_s.append([answered(await client.send(job)) for job in warm][-1])
    every_s = 0.8 * min(alone_s) / CHATS
    print(
        f"a document alone: {min(alone_s):.2f} s; beside each {CHATS} chats, {every_s:.2f} s apart",
        flush=True,
    )
    for number in range(plan.repeat):
        jobs = list(convoy(prompts, number, every_s))
        for client in clients:
            async with client:
                for record in (await run_open_loop(client, jobs)).records:
                    answered(record)


def answered(record: RequestRecord) -> float:
    """Return the time to first token. Raises SystemExit for a failed request."""
    seconds = ttft_s(record)
    if record.error or seconds is None:
        raise SystemExit(f"{record.id} failed: {record.error}")
    return seconds


def of_class(records: Sequence[RequestRecord], klass: str, number: int | None = None) -> list[float]:
    """Times to first token of a class, of one convoy or of all."""
    any_number = r"\d+"
    name = re.compile(rf"\b{klass}-{any_number if number is None else number}\b")
    return [seconds for one in records if name.search(one.id) and (seconds := ttft_s(one)) is not None]


def off_by(run: ReplayedRun) -> float:
    """Largest difference between a request's time to first token and the sum of its causes, seconds."""
    told = [explain(run, record.id) for record in run.records]
    return max(abs(sum(part.seconds for part in one.to_first_token) - (one.ttft_s or 0.0)) for one in told)


def simulated(run: ReplayedRun, under: str | None) -> list[RequestRecord]:
    """Return the run's requests as `headway why --under` simulates them; None: as they ran."""
    records = sorted((one for one in run.records if one.ok), key=lambda one: one.arrival_s)
    config = run.config if under is None else with_setting(run.config, under)
    again = simulate_again(run, records, config, corrected=True).records
    return [replace(new, id=old.id) for old, new in zip(records, again, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description="headway why of live convoys against the clock and an FCFS server.")
    parser.add_argument("--documents", type=int, default=8, help="convoys (default %(default)s)")
    parser.add_argument("--document-tokens", type=int, default=16_000, help="(default %(default)s)")
    parser.add_argument(
        "--threads", type=int, help="of each server (on a loaded machine 1: no thread waits for another)"
    )
    parser.add_argument("--logs", type=Path, help="keep the event logs in this folder")
    parser.add_argument("--json", type=Path, help="write the figures there")
    a = parser.parse_args()
    plan = ConvoyPlan(long_tokens=a.document_tokens, short_tokens=150, short_output=12, repeat=a.documents)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(a.logs or folder) / f"{number}.jsonl" for number in range(1 + len(UNDER))]
        common = ["--max-model-len", str(plan.long_tokens + 256)]
        common += ["--threads", str(a.threads)] if a.threads else []
        with ExitStack() as stack:
            urls = [
                stack.enter_context(ServerProcess([*common, "--event-log", str(log), *more])).url
                for log, more in zip(logs, ([], *UNDER.values()), strict=True)
            ]
            asyncio.run(serve(urls, plan))
        runs = [replay(read_log(log), detail=True) for log in logs]
    return report(runs[0], dict(zip(UNDER, runs[1:], strict=True)), a.documents, a.json)


def report(default: ReplayedRun, served: Mapping[str, ReplayedRun], documents: int, out: Path | None) -> int:
    """Print the figures; return 0 only if all are within their bounds."""
    runs = [default, *served.values()]
    for run in runs:
        if run.differences:
            raise SystemExit(f"the log does not replay: {run.differences[0]}")
    sums_s = max(map(off_by, runs))
    print(f"sums of causes: within {sums_s * 1e3:.2g} ms of the time to first token, "
          f"{sum(len(run.records) for run in runs)} requests")  # fmt: skip
    rows = [compare("as it ran", klass, simulated(default, None), default, documents) for klass in CLASSES]
    for under, run in served.items():
        if with_setting(default.config, under) != run.config:
            raise SystemExit(f"the servers differ in more than {under}: {default.config} and {run.config}")
        rows += [compare(under, klass, simulated(default, under), run, documents) for klass in CLASSES]
    if out is not None:
        report_json = {"schema": "headway.counterfactual/1", "machine": machine(), "sums_s": sums_s,
                       "rows": [asdict(row) for row in rows]}  # fmt: skip
        out.write_text(json.dumps(report_json, indent=1) + "\n")
    return 0 if sums_s <= WITHIN_S and all(row.error <= WITHIN for row in rows) else 1


def compare(under: str, klass: str, simulated_records: list[RequestRecord], run: ReplayedRun, documents: int) -> Row:
    """Return and print medians of a class, as simulated and as served."""
    row = Row(
        under,
        klass,
        statistics.median(of_class(simulated_records, klass)),
        statistics.median(of_class(run.records, klass)),
        [statistics.median(of_class(run.records, klass, number)) for number in range(documents)],
    )
    print(f"{under:<20} {klass:<8} median time to first token {row.simulated_s:.3f} s simulated, {row.served_s:.3f} s "
          f"served: {row.simulated_s / row.served_s - 1:+.1%} (convoys of the served: {min(row.convoys_s):.3f} to "
          f"{max(row.convoys_s):.3f} s)")  # fmt: skip
    return row


if __name__ == "__main__":
    sys.exit(main())
