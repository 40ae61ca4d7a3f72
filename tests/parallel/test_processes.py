"""Ranks as real processes: quick starts, clear ends. Parity by family: test_families_*; draws: test_virtual_parity."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.greedy_reference import prompt_of
from tests.helpers.process_tree import ends_soon
from tests.parallel.rank_processes import BLOCK_TOKENS, KV_BLOCKS, make_rank_config, rank_executor
from tests.parallel.rank_serving import Ask, make_core, serve

from headway.core.errors import ConfigError
from headway.runtime.executor.multi_process import ProcessTransport
from headway.runtime.executor.plans import RankLostError


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=3)


ASKS = [Ask(prompt_of(1, 180), 8), Ask(prompt_of(2, 20), 10, 2), Ask(prompt_of(3, 3), 12, 5)]


def test_worlds_after_the_first_start_in_a_moment_and_meet_where_no_other_user_can(llama: Path) -> None:
    with rank_executor(make_rank_config(llama, 1, 2)):
        pass
    begun = time.monotonic()
    with rank_executor(make_rank_config(llama, 2, 1)) as (_, wire):
        assert time.monotonic() - begun < 5.0
        assert (wire._directory / "rendezvous").is_file()
        assert wire._directory.stat().st_mode & 0o077 == 0


# -- ends ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_is_noticed_at_once(llama: Path) -> None:
    with rank_executor(make_rank_config(llama, 1, 2)) as (executor, wire):
        core = make_core(executor, KV_BLOCKS, BLOCK_TOKENS, stages=2)
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
    wire = ProcessTransport(make_rank_config(tmp_path, 1, 2))
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        wire.start()
    assert all(process.ended for process in wire.processes)


def test_a_rank_out_of_memory_reports_it(llama: Path) -> None:
    wire = ProcessTransport(make_rank_config(llama, 1, 2, kv_blocks=1 << 50))
    with pytest.raises(ConfigError, match=r"there is no memory for a KV cache of [0-9.]+ GiB"):
        wire.start()
    assert all(process.ended for process in wire.processes)


ENGINE = """
import signal, sys
from pathlib import Path
from headway.runtime.executor.multi_process import ProcessTransport
from tests.parallel.rank_processes import make_rank_config

if __name__ == "__main__":
    transport = ProcessTransport(make_rank_config(Path(sys.argv[1]), 1, 2))
    transport.start()
    print(*(process.pid for process in transport.processes), flush=True)
    signal.pause()
"""


def test_no_rank_outlives_an_engine_that_is_killed(llama: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(llama)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert engine.stdout is not None
    pids = [int(pid) for pid in engine.stdout.readline().split()]
    assert len(pids) == 2
    engine.kill()
    engine.wait()
    engine.stdout.close()
    assert all(ends_soon(pid) for pid in pids)
