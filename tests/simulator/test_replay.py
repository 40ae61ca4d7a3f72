"""A live engine's event log, replayed: the same decisions; a changed scheduler or log is noticed."""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.helpers.engine_fixtures import INFO as FAKE
from tests.helpers.marks import quick_first
from tests.helpers.unit_latency import small_machine

from headway.cli.main import main
from headway.core.batch import Batch, EmittedToken, ManualClock, StepResult
from headway.core.errors import ConfigError
from headway.core.request import BACKGROUND_PRIORITY, SamplingParams
from headway.kv.block_manager import BlockManager
from headway.perf.latency import table
from headway.perf.latency.base import BatchLoad, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table import TableLatency
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.scheduler import Scheduler
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import SubmitRequest
from headway.sim.calibration import calibrate, corrected_table
from headway.sim.explanation import explain
from headway.sim.replay import read_log, replay

INFO = msgspec.structs.replace(
    FAKE, max_model_len=1500, context_tokens=1500, vocab_size=100, kv_tokens_total=1600, max_queued_requests=100
)


TRUTH = small_machine()


class Machine:
    """An executor that takes about 1.2 times what the profile says, on the engine's own clock."""

    def __init__(self, clock: ManualClock, rng: random.Random, spread: float) -> None:
        self.clock, self.rng, self.spread = clock, rng, spread
        self.done: deque[StepResult] = deque()

    waits_on: tuple[Any, ...] = ()
    accepts = True
    free = None

    def admit(
        self, request_id: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...] = (),
        kept: bool = False,
    ) -> None:  # fmt: skip
        """Tokens do not matter here."""

    def submit(self, batch: Batch) -> None:
        part = batch.parts[0]
        names = [*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)]
        load = BatchLoad(part.decodes.count, part.decodes.count, part.decodes.kv_sum)
        for chunk in part.prefills:
            load = load.with_chunk(chunk.tokens, TRUTH.attention_s(chunk.start, chunk.tokens))
        elapsed_s = load_s(TRUTH, load) * self.rng.uniform(1.2 - self.spread, 1.2 + self.spread)
        self.clock.advance(elapsed_s)
        self.done.append(
            StepResult(batch.id, [EmittedToken(n, self.rng.choice((2, *range(3, 60))), None) for n in names], elapsed_s)
        )

    def result(self, timeout_s: float | None) -> StepResult | None:
        return self.done.popleft() if self.done else None

    def recover(self) -> None:
        """Never lost."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to close."""


def live(seed: int, spread: float = 0.3, documents: float = 0.2) -> list[dict[str, Any]]:
    """A run with arrivals, aborts, time-outs, end tokens and a small pool; its log, through JSON as in a file.

    documents: share of requests that no client waits for."""
    rng, clock = random.Random(seed), ManualClock()
    log: list[dict[str, Any]] = []
    config = SchedulerConfig(t_target_s=0.02)
    latency = CorrectedLatency(small_machine(), 5.0)
    scheduler = Scheduler(config, latency, BlockManager(1600, 16))
    machine = Machine(clock, rng, spread)
    core = EngineCore(scheduler, machine, clock, INFO, lambda kind, fields: log.append({"event": kind, **fields}))
    waiting = [(rng.uniform(0, 3), f"q{i}") for i in range(40)]
    waiting.sort(reverse=True)
    while waiting or not core.idle:
        while waiting and waiting[-1][0] <= clock.now():
            at_s, name = waiting.pop()
            size = rng.choice((rng.randint(1, 100), rng.randint(301, 900)))
            params = SamplingParams(max_tokens=rng.randint(1, 60))
            message = SubmitRequest(
                id=name, prompt_tokens=size, params=params, received_s=at_s, timeout_s=rng.choice((None, None, 0.8)),
                priority=BACKGROUND_PRIORITY if rng.random() < documents else 0,
            )  # fmt: skip
            core.submit(message, memoryview(np.full(size, 5, dtype=np.int32).tobytes()))
            if rng.random() < 0.1:
                core.abort(name)
        if core.idle and waiting:
            clock.advance(max(0.0, waiting[-1][0] - clock.now()))
        core.step()
        clock.advance(rng.uniform(0, 2e-4))
    return [json.loads(msgspec.json.encode(event)) for event in log]


@pytest.mark.parametrize("seed", quick_first(range(12), 4))
def test_a_live_run_replays_to_the_same_decisions_which_explain_each_request(seed: int) -> None:
    log = live(seed)
    told = replay(log, detail=True)
    assert told.differences == []
    assert len(told.batches) == len(told.steps) == sum(event["event"] == "batch" for event in log) > 50
    assert len(told.records) == sum(event["event"] == "add" for event in log)
    for record in told.records:
        why = explain(told, record.id)
        if why.ttft_s is not None:
            assert sum(one.seconds for one in why.to_first_token) == pytest.approx(why.ttft_s, abs=1e-6)


def test_a_decision_that_differs_is_found() -> None:
    log = live(1)
    batch = next(event for event in log if event["event"] == "batch" and event["chunks"])
    batch["chunks"][0][2] += 1
    assert f"batch {batch['id']} was" in replay(log).differences[0]
    other = live(1)
    other[0]["config"]["policy"] = "fcfs"
    assert replay(other).differences


def test_a_log_that_cannot_be_replayed_is_an_error_with_the_reason(tmp_path: Path) -> None:
    log = live(1)
    with pytest.raises(ConfigError, match="start event"):
        replay(log[1:])
    with pytest.raises(ConfigError, match="latency model"):
        replay([{**log[0], "latency": None}])
    with pytest.raises(ConfigError, match="cannot be replayed"):
        replay([log[0], {"event": "add", "request": "x"}])
    file = tmp_path / "log"
    file.write_text('{"event": "start"}\nnonsense\n{}\n')
    with pytest.raises(ConfigError, match="log: line 2 of the log cannot be read"):
        list(read_log(file))


def test_calibration_reports_profile_errors_and_simulates_the_same_requests() -> None:
    told = replay(live(3, spread=0.0))
    result = calibrate(told)
    assert result.profile["mean"] == pytest.approx(1 / 6)
    assert result.running["mean"] is not None
    assert result.profile["mean"] is not None
    assert result.running["mean"] < result.profile["mean"]
    assert result.measured.total.requests == result.simulated.total.ok > 10
    learned = calibrate(told, corrected=True)
    one, other = learned.simulated.total.latencies["tbt_s"]["p50"], learned.measured.total.latencies["tbt_s"]["p50"]
    assert one == pytest.approx(other, rel=0.1)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out, kept = tmp_path / "log.jsonl", tmp_path / "out.json", tmp_path / "profile.json"
    log.write_bytes(b"\n".join(msgspec.json.encode(event) for event in live(4)) + b"\n{torn")
    assert main(["profile", "check", str(log), "--json", str(out), "--save", str(kept)]) == 0
    run = replay(read_log(log))
    load = BatchLoad(8, 8, 3_000)
    assert load_s(TableLatency(table.load(kept, None)), load) == pytest.approx(load_s(corrected_table(run), load))
    assert "no decisions differ" in capsys.readouterr().out
    assert json.loads(out.read_bytes())["schema"] == "headway.calibration/1"
