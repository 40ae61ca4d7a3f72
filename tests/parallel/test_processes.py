"""Ranks as real processes: draws that cross them, quick starts, clear ends. Parity by family: test_families_*."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.rank_serving import Ask, make_core, prompt_of, serve

from headway.core.errors import ConfigError
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.executor.rank_config import RankConfig
from headway.runtime.executor.rank_processes import ProcessTransport
from headway.runtime.executor.rank_transport import RankLostError

BLOCKS, BLOCK = 64, 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=3)


def settings(folder: Path, tp: int, stages: int, **changes: Any) -> RankConfig:
    config = RankConfig(
        model=str(folder), dtype="auto", max_model_len=None, attention_backend="cpu", threads=1, kv_blocks=BLOCKS,
        block_tokens=BLOCK, eos=(), tp=tp, stages=stages, kvp=1, patience_s=60.0,
    )  # fmt: skip
    return msgspec.structs.replace(config, **changes)


@contextmanager
def ranks(config: RankConfig) -> Iterator[tuple[MultiProcessExecutor, ProcessTransport]]:
    wire = ProcessTransport(config)
    wire.start()
    executor = MultiProcessExecutor(wire, config.layout, config.kv_blocks)
    try:
        yield executor, wire
    finally:
        executor.close()
        assert all(not process.is_alive() for process in wire.processes)
        assert not Path(wire._directory).exists()


ASKS = [Ask(prompt_of(1, 180), 8), Ask(prompt_of(2, 20), 10, 2), Ask(prompt_of(3, 3), 12, 5)]


def test_sampled_tokens_and_logprobs_cross_processes(llama: Path) -> None:
    asks = [
        Ask(prompt_of(0, 60), 12, 0, {"temperature": 0.9, "seed": 7, "logprobs": 3}),
        Ask(prompt_of(1, 30), 12, 1, {"repetition_penalty": 1.3}),
    ]
    answers = []
    for tp, stages in ((2, 1), (1, 2)):
        with ranks(settings(llama, tp, stages)) as (executor, _):
            answers.append(serve(make_core(executor, BLOCKS, BLOCK, stages=stages), asks))
    assert answers[0] == answers[1]


def test_worlds_after_the_first_start_in_a_moment(llama: Path) -> None:
    with ranks(settings(llama, 1, 2)):
        pass
    begun = time.monotonic()
    with ranks(settings(llama, 2, 1)):
        assert time.monotonic() - begun < 5.0


# -- ends ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_is_noticed_at_once(llama: Path) -> None:
    with ranks(settings(llama, 1, 2)) as (executor, wire):
        core = make_core(executor, BLOCKS, BLOCK, stages=2)
        assert len(serve(core, ASKS[:1])[0]) == 8
        victim = wire.processes[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(RankLostError, match="worker 1 has ended with signal 9"):
            serve(core, ASKS[1:])
        assert time.monotonic() - begun < 5.0


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_bad_checkpoint_is_the_error_that_the_user_reads(llama: Path, tmp_path: Path, damage: str) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-5000])
    wire = ProcessTransport(settings(tmp_path, 1, 2))
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        wire.start()
    assert all(not process.is_alive() for process in wire.processes)


def test_a_rank_that_runs_out_of_memory_says_so(llama: Path) -> None:
    wire = ProcessTransport(settings(llama, 1, 2, kv_blocks=1 << 50))
    with pytest.raises(ConfigError, match=r"there is no memory for a KV cache of [0-9.]+ GiB"):
        wire.start()
    assert all(not process.is_alive() for process in wire.processes)


ENGINE = """
import sys, time
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from test_processes import ProcessWire, settings

if __name__ == "__main__":
    wire = ProcessWire(settings(Path(sys.argv[1]), 1, 2))
    wire.start()
    print(*(process.pid for process in wire.processes), flush=True)
    time.sleep(600)
"""


def test_no_rank_outlives_an_engine_that_is_killed(llama: Path) -> None:
    here = Path(__file__).parent
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(llama), "", str(here), str(here.parent)], stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    pids = [int(pid) for pid in engine.stdout.readline().split()]
    assert len(pids) == 2
    engine.kill()
    engine.wait()
    engine.stdout.close()
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
