"""Timed instances behind the real router: every request gets its tokens, whatever its policy does with it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from tests.helpers.timed_cluster import scenario_of, spec_of, timed_cluster

from headway.control.controller import ClusterController
from headway.control.log import RecordingController, replay
from headway.core.errors import ConfigError
from headway.core.files import ScratchFolder
from headway.core.request import SamplingParams
from headway.policy.placement.registry import make_placement
from headway.runtime.cluster.policies import PlacementChain
from headway.runtime.engine.protocol import SubmitRequest

SCENARIO: dict[str, Any] = {
    "cluster": {
        "accelerator": "h100-80gb",
        "pools": [
            {"role": "prefill", "count": 3, "tp": 4, "kv_tokens": 200_000},
            {"role": "decode", "count": 1, "tp": 4, "kv_tokens": 200_000},
        ],
    },
    "model": "llama-3-8b",
    "latency": {"source": "roofline"},
    "policy": {"policy": "fcfs", "chunking": "static:4096", "max_num_batched_tokens": 4096},
    "workload": {"mix": [{"class": "a", "share": 1.0, "prompt": "constant:500", "output": "constant:3"}], "qps": 1.0},
}
PROMPTS = [400, 100_000, *[300 + 50 * i for i in range(10)], 80_000, *[700] * 5]


def written(folder: Path, placement: str, options: dict[str, object], rows: int) -> Path:
    data = msgspec.json.decode(msgspec.json.encode(SCENARIO))
    data["cluster"] |= {"placement": placement, "options": options, "span_rows": rows}
    file = folder / "scenario.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


async def serve(file: Path, kill: int | None) -> list[int]:
    """Tokens that each request got. kill: an instance that is killed on the way."""
    folder = ScratchFolder("headway-timed-")
    client = timed_cluster(file, folder.path)

    async def one(number: int, prompt: int) -> int:
        await asyncio.sleep(0.04 * number)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        submit = SubmitRequest(id=f"r{number}", received_s=time.monotonic(), prompt_tokens=prompt, params=params)
        count = 0
        async for delta in client.generate(submit, np.ones(prompt, np.int32).tobytes()):
            assert delta.error is None, delta.error
            count += len(delta.tokens)
        return count

    try:
        await client.start()
        assert client._live is not None
        machine: ClusterController = client._live.machine
        asked = asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(PROMPTS)))
        if kill is not None:
            await asyncio.sleep(0.3)
            os.kill(client.fleet[kill].pid, signal.SIGKILL)
        found = await asked
        assert not machine.requests
        assert not any(machine.state.residents)
        return list(found)
    finally:
        await client.close()
        folder.close()


OPTIONS: dict[str, dict[str, Any]] = {
    "fifo": {"long_sp": 2},
    "pecsched": {"long_sp": 3, "long_replicas": "fixed"},
    "tetris": {},
    "ladder": {},
}


@pytest.mark.parametrize(
    ("placement", "kill", "rows"),
    [
        pytest.param("pecsched", None, 2000, marks=pytest.mark.long),
        ("fifo", 1, 0),
        pytest.param("tetris", None, 0, marks=pytest.mark.long),
        pytest.param("pecsched", None, 0, marks=pytest.mark.long),
        pytest.param("ladder", None, 2000, marks=pytest.mark.long),
        pytest.param("pecsched", 2, 2000, marks=pytest.mark.long),
        pytest.param("ladder", 0, 0, marks=pytest.mark.long),
    ],
)
def test_every_request_gets_its_tokens_and_what_was_decided_is_decided_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str, kill: int | None, rows: int
) -> None:
    """Again: by the machine and the policy alone, driven from the log of the live run, in the log's time."""
    lines: list[bytes] = []
    options = OPTIONS[placement]
    file = written(tmp_path, placement, options, rows)
    spec = spec_of(scenario_of(file))
    context = spec.policy_context
    recording = partial(RecordingController, sink=lines.append)
    monkeypatch.setattr("headway.runtime.cluster.driver.ClusterController", recording)
    found = asyncio.run(asyncio.wait_for(serve(file, kill), 60.0))
    assert found == [4] * len(PROMPTS)
    monkeypatch.undo()
    decisions, difference = replay(
        lines, lambda about: PlacementChain(lambda: make_placement(placement, context, options))
    )
    assert difference is None
    assert decisions > 4 * len(PROMPTS)
    log = b"".join(lines)
    assert b'"CommitSpans"' in log
    if placement == "pecsched" and kill is None:
        assert b'"PreemptRequest"' in log
        said = [line["event"] for line in map(msgspec.json.decode, lines) if "event" in line]
        paused = [fields["progress"][0] for kind, fields in said if kind == "SpanPaused"]
        assert paused
        if rows:
            assert any(tokens % (2 * 3) == 0 < tokens for tokens in paused), "in a later piece"
            shares = [line["share"] for line in map(msgspec.json.decode, lines) if line.get("share") is not None]
            assert shares
            assert all(0 < share < 1 for share in shares)
    assert (b'["InstanceLost"' in log) == (kill is not None)


def test_a_scenario_without_a_placement_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    data = {**SCENARIO, "cluster": {"accelerator": "h100-80gb"}}
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match=r"cluster\.placement is missing"):
        scenario_of(file)


def test_transfers_and_spans_take_the_simulators_times(tmp_path: Path) -> None:
    from tests.helpers.timed.times import ClusterTimes

    from headway.core.request import SpanTask
    from headway.perf.latency.groups import GroupShape

    spec = spec_of(scenario_of(written(tmp_path, "fifo", {"long_sp": 2}, 0)))
    times = ClusterTimes(spec, 0)
    run = SpanTask(0, 60_000, (0, 1, 2))
    assert times.run_s(run, ()) == spec.spans.prefill_s(0, 60_000, GroupShape(3))
    grown = times.run_s(SpanTask(30_000, 60_000, (0, 1, 2)), (SpanTask(0, 30_000, (0,)),))
    assert grown > spec.spans.prefill_s(30_000, 30_000, GroupShape(3)), "KV is spread over the larger group"
    link = spec.links.between(spec.instances[0], spec.instances[3])
    assert times.send_s(1000.0, 3) == link.transfer_s(1000 * spec.shape.kv_bytes_per_token // 4)
    saved = times.saved(run, 0, 60_000, 16)
    assert 0 < saved.kv_bytes < saved.kv_bytes_at_end == 20_000 * spec.shape.kv_bytes_per_token
