"""Documents that are prepared beside chats, in virtual time: an arrival interrupts their iterations between layers."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.helpers.unit_latency import small_machine

from headway.core.request import BACKGROUND_PRIORITY
from headway.policy.iteration.config import SchedulerConfig
from headway.sim import InstanceSpec, NoiseSpec, RunSpec, SimResult, simulate
from headway.sim.replay import replay
from headway.sim.workload import TraceRequest

DOCUMENT = 32_000


def chats(seconds: float, every_s: float, output: int = 16) -> list[TraceRequest]:
    rng, at, drawn = random.Random(1), 0.0, []
    while at < seconds:
        at += rng.expovariate(1 / every_s)
        drawn.append(TraceRequest(at, rng.randint(100, 250), output, klass="chat"))
    return drawn


def document(tokens: int = DOCUMENT, at_s: float = 1.0) -> TraceRequest:
    return TraceRequest(at_s, tokens, 1, klass="document", priority=BACKGROUND_PRIORITY)


def served(load: list[TraceRequest], layers: int, run: RunSpec = RunSpec(), **fields: Any) -> SimResult:  # noqa: B008
    config = SchedulerConfig(interruptible_layers=layers, **fields.pop("config", {}))
    spec = InstanceSpec(config=config, latency=small_machine(), kv_tokens=200_000, block_tokens=16, **fields)
    return simulate(spec, load, run)


class ChatTimes(NamedTuple):
    """99th percentiles of chats that came while the document was prepared, milliseconds."""

    ttft_ms: float
    tbt_ms: float
    until_s: float


def times(result: SimResult, until_s: float | None = None) -> ChatTimes:
    ends = [record.token_s[-1] for record in result.records if record.klass == "document"]
    until_s = until_s or ends[0]
    beside = [r for r in result.records if r.klass == "chat" and 1.0 <= r.arrival_s <= until_s]
    assert len(beside) > 100
    ttft = [record.token_s[0] - record.arrival_s for record in beside]
    gaps = [gap for record in beside for gap in np.diff(record.token_s)]
    return ChatTimes(1000 * float(np.percentile(ttft, 99)), 1000 * float(np.percentile(gaps, 99)), until_s)


@pytest.mark.parametrize("every_s", [0.1, 0.04])
def test_chats_are_answered_as_without_the_document(every_s: float) -> None:
    load = chats(60.0, every_s)
    with_it = times(served([*load, document()], layers=32))
    without = times(served(load, layers=32), with_it.until_s)
    as_before = times(served([*load, document()], layers=0))
    assert with_it.ttft_ms < without.ttft_ms + 1.0 < as_before.ttft_ms - 4.0
    assert with_it.tbt_ms < 1.02 * without.tbt_ms
    assert as_before.tbt_ms > 9.0


@pytest.mark.parametrize("layers", [2, 8])
def test_an_arrival_waits_for_one_layer_at_most(layers: int) -> None:
    load = chats(60.0, 0.1, output=1)
    run = RunSpec(keep_iterations=True)
    result = served([*load, document()], layers, run, config={})
    rows = result.iterations
    names = {record.id for record in result.records if record.klass == "document"}
    arrivals = sorted(record.arrival_s for record in result.records)
    interrupted = 0
    for row in rows:
        (begin_s, end_s), prepares = row.stages[0], {name for name, _, _ in row.chunks} <= names
        came = [at for at in arrivals if begin_s < at < end_s]
        if prepares and came and not row.decodes:
            interrupted += 1
            assert end_s - came[0] <= row.predicted_s / layers * (1 + 1e-9)
    assert interrupted > 50


def test_nothing_is_computed_twice_and_all_seconds_are_counted_once() -> None:
    load = chats(30.0, 0.1)
    result, plain = served([*load, document(8000)], layers=8), served([*load, document(8000)], layers=0)
    for one in (result, plain):
        assert one.replicas[0].prefill_tokens == sum(r.prompt_tokens for r in load) + 8000
        assert all(record.ok for record in one.records)
    alone = served([document(8000)], layers=8).replicas[0]
    chats_alone = served(load, layers=8).replicas[0]
    assert result.replicas[0].busy_s == pytest.approx(alone.busy_s + chats_alone.busy_s, rel=0.03)


def test_a_document_is_prepared_though_others_never_stop_to_decode() -> None:
    endless = [TraceRequest(0.0, 100, 60_000, klass="chat") for _ in range(2)]
    result = served([*endless, document(2000)], layers=4)
    (record,) = (record for record in result.records if record.klass == "document")
    others_s = min(r.token_s[-1] for r in result.records if r.klass == "chat")
    assert record.ok
    assert record.token_s[-1] < others_s
    # Of the time at least 5% went to it: 10 ms after each 128 iterations of a little more than 1 ms.
    alone_s = served([document(2000)], layers=4).replicas[0].busy_s
    assert alone_s > 0.05 * (record.token_s[-1] - 1.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_simulated_log_with_interruptions_replays_to_the_same_decisions(seed: int) -> None:
    log: list[dict[str, Any]] = []
    config = SchedulerConfig(interruptible_layers=4)
    spec = InstanceSpec(config=config, latency=small_machine(), kv_tokens=20_000, block_tokens=16, learns=seed % 2 == 1)
    load = [*chats(5.0, 0.02), *(document(3000, at) for at in (0.1, 0.2, 1.0))]
    run = RunSpec(seed=seed, noise=NoiseSpec("lognormal", 0.3), patience_s=(None, 0.5)[seed // 2])
    simulate(spec, load, run, log=lambda kind, fields: log.append({"event": kind, **fields}))
    assert sum(event["event"] == "interrupt" for event in log) > 5
    assert replay(log).differences == []
