"""A real convoy: chats behind long documents on 2 prefill instances and 1 decode instance of this machine.

    python -m benchmarks.cluster_live [--policies fifo pecsched ladder] [--plot out] [--json out.json]
    python -m benchmarks.cluster_live --trace azure.csv --slice 600s:700s --rate 2 --long-tokens 4000

Engine processes of one thread each, behind the router of `headway cluster` in this process; the same requests under
each policy, one policy after another. Without --trace, a synthetic slice (seeded): chats all the time, and a few
documents. Without --model, random weights of 24 thin layers: runs are paused between layers, and what a paused run
keeps beside its KV is the smaller a share the more layers there are.

`fifo` (first come, first served: a document takes both prefill instances, everything decodes where it was prefilled,
so that the decode instance has nothing to do); `fifo-mixed`: the same over three instances that do both, a document
on all; `pecsched`; `ladder` (one queue before the instances, LARS inside them). A picture of each: instance x time.

Times are of requests as the router's callers see them. The gap from first to second token has the hand-over of KV in
it, TBT is of the tokens behind the second. Where cores are fewer than instances (said in the first line), those that
compute at once take from each other: a run on two is hardly faster than on one, decodes are slowed by prefills of
others, and predicted times, which each instance measures for itself, are too short. The order of policies stands, and
ratios roughly; milliseconds are this machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.core.files import ScratchFolder
from headway.core.request import SamplingParams
from headway.core.settings import resolve
from headway.runtime.assembly import cluster
from headway.runtime.assembly.cluster import replay_log
from headway.runtime.assembly.instances import launcher
from headway.runtime.cluster.client import ClusterClient
from headway.runtime.cluster.cluster_file import ClusterFile, cluster_file, nodes_of
from headway.runtime.cluster.instances import LiveInstance
from headway.runtime.engine.protocol import (
    EngineClient,
    EngineInfo,
    FromInstance,
    KvArrived,
    ResumeSpan,
    SpanTaskDone,
    SpanTaskPaused,
    SubmitRequest,
)
from headway.serving.load.prompts import machine
from headway.serving.serve_settings import ServeSettings, instance_configs
from headway.sim.cluster.state import GanttBar
from headway.sim.replay import read_log
from headway.sim.report.perfetto import engine_timeline
from headway.sim.report.plots import gantt_figure
from headway.sim.workload import TraceRequest
from headway.sim.workload.traces import read_trace
from headway.sim.workload.transforms import classify, clip_lengths, rescale_to_rate, slice_by

APART = [{"count": 2, "role": "prefill"}, {"count": 1, "role": "decode"}]
MIXED = [{"count": 3}]
FCFS = {"scheduling_policy": "fcfs"}
LARS = {"scheduling_policy": "lars", "t_target_ms": 100}
POLICIES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    "fifo": ("fifo", {"long_sp": 2}, APART, FCFS),
    "fifo-mixed": ("fifo", {"long_sp": 3}, MIXED, FCFS),
    "pecsched": ("pecsched", {"long_sp": 2, "long_replicas": "fixed"}, APART, FCFS),
    "ladder": ("ladder", {}, APART, LARS),
}
DEFAULT = ("fifo", "pecsched", "ladder")
SHAPE = ("--hidden", "128", "--layers", "24", "--heads", "4", "--kv-heads", "2", "--mlp", "384", "--dtype", "float32")


class Watched(LiveInstance):
    """Tells when paused runs go on. `hear(number, request, at_s)`."""

    hear: Any = None

    def tell(self, message: msgspec.Struct, *frames: Any) -> None:
        if isinstance(message, ResumeSpan) and self.hear is not None:
            self.hear(self.number, message.id, time.monotonic())
        super().tell(message, *frames)


class Watcher(ClusterClient):
    """Keeps what instances say of runs, pauses and pieces of KV, with the times."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.done: list[tuple[int, SpanTaskDone]] = []
        self.paused: list[tuple[float, int, SpanTaskPaused]] = []
        self.arrived: list[tuple[int, KvArrived]] = []
        self.proceeds: list[tuple[int, str, float]] = []
        for each in self.fleet:
            each.hear = lambda *what: self.proceeds.append(what)  # type: ignore[attr-defined]

    async def _start(self) -> EngineInfo:
        info = await super()._start()
        pass_on = self._events.said

        def said(number: int, message: FromInstance) -> None:
            self._keep(number, message)
            pass_on(number, message)

        self._events.said = said
        return info

    def _keep(self, number: int, message: FromInstance) -> None:
        if isinstance(message, SpanTaskDone):
            self.done.append((number, message))
        elif isinstance(message, SpanTaskPaused):
            self.paused.append((time.monotonic(), number, message))
        elif isinstance(message, KvArrived):
            self.arrived.append((number, message))

    def shares(self) -> list[float]:
        """Of each pause: what the group keeps of activations, as a share of the KV that its run will have."""
        kept: dict[tuple[str, int, int], list[SpanTaskPaused]] = {}
        for _, _, said in self.paused:
            kept.setdefault((said.id, said.index, said.layer), []).append(said)
        return [
            sum(said.activation_bytes for said in each) / sum(said.kv_bytes_at_end for said in each)
            for each in kept.values()
        ]

    def bars(self, logs: Sequence[Path], zero_s: float) -> list[GanttBar]:
        """Runs, pauses, pieces of KV and iterations, in seconds from `zero_s`."""
        found: list[GanttBar] = []
        for number, run in self.done:
            name, at_s = _name(run.id), run.began_s
            for pause_s, on, said in self.paused:
                if (on, said.id, said.index) != (number, run.id, run.index):
                    continue
                again = [s for n, request, s in self.proceeds if (n, request) == (number, run.id) and s > pause_s]
                found.append(GanttBar("span", number, at_s, pause_s, name))
                found.append(GanttBar("pause", number, pause_s, min(again), name))
                at_s = min(again)
            found.append(GanttBar("span", number, at_s, run.ended_s, name))
        for number, piece in self.arrived:
            found.append(
                GanttBar("transfer", piece.source, piece.began_s, piece.ended_s, _name(piece.id), f"to {number}")
            )
        for number, log in enumerate(logs):
            found += [GanttBar("batch", number, start_s, end_s, "") for start_s, end_s in _busy(log)]
        return [
            bar._replace(start_s=bar.start_s - zero_s, end_s=bar.end_s - zero_s)
            for bar in found
            if bar.start_s >= zero_s
        ]


def _name(attempt: str) -> str:
    return attempt.partition("#")[0]


def _busy(log: Path) -> Iterable[tuple[float, float]]:
    """When an instance's scheduler computed; breaks of 5 ms and less do not count."""
    merged: list[tuple[float, float]] = []
    for one in sorted(engine_timeline(read_log(log)).slices, key=lambda one: one.start_s):
        if merged and one.start_s - merged[-1][1] < 0.005:
            merged[-1] = merged[-1][0], max(merged[-1][1], one.end_s)
        else:
            merged.append((one.start_s, one.end_s))
    return merged


def synthetic(options: argparse.Namespace) -> list[TraceRequest]:
    """Chats, Poisson; documents evenly from the first second on."""
    chance = np.random.default_rng(options.seed)
    count = int(options.seconds * options.chats_per_s)
    at_s = np.sort(chance.uniform(0, options.seconds, count))
    prompts = np.clip(chance.lognormal(np.log(120), 0.6, count), 20, 600).astype(int)
    chats = [TraceRequest(float(s), int(n), 24, "short") for s, n in zip(at_s, prompts, strict=True)]
    gap_s = options.seconds / max(1, options.documents)
    documents = [
        TraceRequest(1.0 + i * gap_s, int(options.document_tokens * chance.uniform(0.75, 1.25)), 24, "long")
        for i in range(options.documents)
    ]
    return sorted([*chats, *documents], key=lambda request: request.arrival_s)


def traffic(options: argparse.Namespace) -> list[TraceRequest]:
    if options.trace is None:
        return synthetic(options)
    requests = slice_by(read_trace(options.trace).requests, options.slice)
    requests = classify(requests, options.long_tokens)
    if options.rate is not None:
        requests = rescale_to_rate(requests, options.rate)
    return clip_lengths(requests, options.most_prompt, options.most_output, least=2)


def started(name: str, model: str, options: argparse.Namespace, folder: Path) -> tuple[Watcher, ClusterFile, Path]:
    """The cluster of a policy, starting; its file; its log of decisions (those of instances go to LOG.0, LOG.1 ...)."""
    placement, chosen, pools, scheduler = POLICIES[name]
    log = folder / name
    if placement in ("fifo", "pecsched"):
        chosen = {**chosen, "long_tokens": options.long_tokens}
    serve = {
        "threads": 1, "dtype": "float32", "kv_cache_memory": options.kv, "latency_profile": "quick",
        "max_model_len": options.max_model_len, "event_log": str(log), **scheduler,
    }  # fmt: skip
    content = {"pools": pools, "model": model, "placement": placement, "options": chosen, "serve": serve}
    if options.span_rows is not None:
        content["span_rows"] = options.span_rows
    file = cluster_file(content, name)
    settings = resolve(ServeSettings, file=file.serve, origin=f"{name}: serve")
    configs = instance_configs(file, name, model, settings)
    roles = [pool.role for pool in file.pools for _ in range(pool.count)]
    instances = [
        Watched(number, role, node, 0, config, launcher(number, folder))
        for number, (role, node, config) in enumerate(zip(roles, nodes_of(file), configs, strict=True))
    ]
    decisions = cluster.open_log(str(log))
    client = Watcher(
        instances,
        cluster.links(file),
        lambda infos: cluster.rules_of(file, model, infos, decisions),
        placement=placement,
        backends=file.backends,
    )
    return client, file, log


class Times:
    """Of one request: when it was due, and when each of its tokens was told."""

    def __init__(self, request: TraceRequest, due_s: float) -> None:
        self.request, self.due_s = request, due_s
        self.told: list[tuple[float, int]] = []


async def ask(client: EngineClient, name: str, request: TraceRequest, due_s: float, salt: str = "") -> Times:
    info, found = client.info, Times(request, due_s)
    ids = np.random.default_rng(request.prompt_tokens).integers(3, info.vocab_size, request.prompt_tokens, np.int32)
    await asyncio.sleep(due_s - time.monotonic())
    params = SamplingParams(temperature=0.0, max_tokens=max(2, request.output_tokens), ignore_eos=True)
    submit = SubmitRequest(
        id=name, received_s=due_s, prompt_tokens=request.prompt_tokens, params=params, cache_salt=salt
    )
    async for delta in client.generate(submit, ids.tobytes()):
        if delta.error is not None:
            raise SystemExit(f"{name}: {delta.error}")
        found.told += [(time.monotonic(), token) for token in delta.tokens]
    return found


async def convoy(client: EngineClient, requests: Sequence[TraceRequest], salt: str = "") -> tuple[float, list[Times]]:
    """All requests at their times; when the first was due. salt: of the prefixes that they share."""
    try:
        await client.start()
        warm = TraceRequest(0.0, 200, 4)
        await asyncio.gather(*(ask(client, f"warm{i}", warm, time.monotonic()) for i in range(4)))
        zero_s = time.monotonic() + 0.5
        asked = (
            ask(client, f"{request.klass[0]}{i}", request, zero_s + request.arrival_s, salt)
            for i, request in enumerate(requests)
        )
        return zero_s, await asyncio.gather(*asked)
    finally:
        await client.close()


def row_of(name: str, client: Watcher, times: Sequence[Times]) -> dict[str, Any]:
    waits: dict[str, list[float]] = {"short": [], "long": []}
    ends: dict[str, list[float]] = {"short": [], "long": []}
    gaps: list[float] = []
    seconds: list[float] = []
    for one in times:
        told = [at_s for at_s, _ in one.told]
        waits[one.request.klass].append(told[0] - one.due_s)
        ends[one.request.klass].append(told[-1] - one.due_s)
        if one.request.klass == "short":
            seconds.append(told[1] - told[0])
        gaps += np.diff(told[1:]).tolist()
    shares = client.shares()
    return {
        "policy": name,
        "short_ttft_s": points(waits["short"]),
        "long_ttft_s": points(waits["long"]),
        "long_jct_s": points(ends["long"]),
        "short_second_s": points(seconds),
        "tbt_s": points(gaps),
        "restarts": client.stats.engine_restarts_total,
        "pauses": len(shares),
        "saved_share": {"median": statistics.median(shares), "max": max(shares)} if shares else None,
    }


def points(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99 = np.percentile(values, (50, 99)).tolist()
    return {"p50": p50, "p99": p99, "mean": statistics.fmean(values)}


COLUMNS = (
    ("short_ttft_s", "short TTFT", ("p50", "p99")),
    ("short_second_s", "to 2nd token", ("p50", "p99")),
    ("tbt_s", "TBT from there", ("p50", "p99")),
    ("long_ttft_s", "long TTFT", ("mean",)),
    ("long_jct_s", "long JCT", ("mean", "p99")),
)


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"{'':10}" + "".join(f" | {title:^{8 * len(points)}}" for _, title, points in COLUMNS) + " | pauses, kept")
    print(f"{'':10}" + "".join(" | " + "".join(f"{point:>8}" for point in points) for _, _, points in COLUMNS) + " |")
    for row in rows:
        cells = ("".join(f"{_time((row[key] or {}).get(point)):>8}" for point in points) for key, _, points in COLUMNS)
        share = row["saved_share"]
        kept = f", activations {share['median']:.1%} of KV (paper: < 5%)" if share else ""
        print(f"{row['policy']:10} | {' | '.join(cells)} | {row['pauses']}{kept}", flush=True)
        if row["restarts"]:
            print(f"{row['policy']:10} | was disturbed: instances were lost and started again: {row['restarts']}")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds * 1e3:.0f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description="A convoy on live instances of this machine, under several policies.")
    parser.add_argument("--policies", nargs="*", default=list(DEFAULT), choices=list(POLICIES))
    parser.add_argument("--model", type=Path, help="a checkpoint; default: random weights, 24 layers of width 128")
    parser.add_argument("--kv", default="768M", help="KV cache of each instance (default 768M)")
    parser.add_argument("--max-model-len", type=int, default=32768, help="longest prompt and answer (default 32768)")
    parser.add_argument("--span-rows", type=int, help="rows of a span that are computed at once (default: as served)")
    parser.add_argument("--long-tokens", type=int, default=2000, help="prompts above this are long (default 2000)")
    parser.add_argument("--trace", type=Path, help="a trace of any known format, instead of the synthetic slice")
    parser.add_argument("--slice", default="0s:60s", help="of the trace: 600s:660s or 100:200 (default 0s:60s)")
    parser.add_argument("--rate", type=float, help="of the trace: requests a second; default: its own")
    parser.add_argument("--most-prompt", type=int, default=16000, help="of the trace: longer prompts are cut")
    parser.add_argument("--most-output", type=int, default=48, help="of the trace: longer answers are cut")
    parser.add_argument("--seconds", type=float, default=40.0, help="synthetic: of arrivals")
    parser.add_argument("--chats-per-s", type=float, default=2.0, help="synthetic")
    parser.add_argument("--documents", type=int, default=3, help="synthetic: how many")
    parser.add_argument("--document-tokens", type=int, default=8000, help="synthetic: mean, from 3/4 to 5/4 of it")
    parser.add_argument("--seed", type=int, default=0, help="synthetic")
    parser.add_argument("--plot", type=Path, default=Path("out"), help="folder for pictures (default out)")
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    try:
        requests = traffic(options)
    except ConfigError as error:
        parser.error(str(error))
    if not requests:
        parser.error("there are no requests in that slice")
    about = machine()
    many = [sum(request.klass == klass for request in requests) for klass in ("short", "long")]
    print(f"{about}; 3 instances of 1 thread")
    print(f"{many[0]} short and {many[1]} long requests in {requests[-1].arrival_s:.0f} s")
    rows, answers = [], []
    with tempfile.TemporaryDirectory() as made:
        model = str(options.model or Path(made) / "model")
        if options.model is None:
            script = Path(__file__).parents[1] / "scripts" / "make_checkpoint.py"
            subprocess.run([sys.executable, str(script), *SHAPE, "--out", model], check=True, capture_output=True)
        for name in options.policies:
            folder = ScratchFolder("headway-live-")
            client, file, log = started(name, model, options, folder.path)
            zero_s, times = asyncio.run(convoy(client, requests))
            rows.append(row_of(name, client, times))
            answers.append([[token for _, token in one.told] for one in times])
            bars = client.bars([Path(f"{log}.{each.number}") for each in client.fleet], zero_s)
            options.plot.mkdir(parents=True, exist_ok=True)
            picture = options.plot / f"cluster-live-{name}.png"
            figure = gantt_figure(
                bars,
                [each.initial_instance for each in client.fleet],
                f"{name}: 3 live instances on {about['cores']} cores",
            )
            figure.savefig(picture)
            print(f"{name}: {picture}, replayed: ", end="", flush=True)
            print(replay_log(file, model, log)[0])
            folder.close()
    show(rows)
    same = all(each == answers[0] for each in answers)
    if len(answers) > 1:
        print(f"answers under all policies are {'equal' if same else 'NOT EQUAL'}")
    if options.json is not None:
        report = {"schema": "headway.cluster_live/1", "machine": about, "requests": many, "rows": rows, "equal": same}
        options.json.write_bytes(msgspec.json.encode(report))
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
