"""What a worker process logs, it logs like the server."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
from headway.core.errors import ConfigError
from headway.runtime.embedded import model_path
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.executor.plans import RankConfig
from headway.runtime.executor.multi_process import ProcessTransport

if __name__ == "__main__":
    # a time that no clock can wait for: an error that only the workers meet
    engine = EngineConfig(
        model=str(model_path()), attention_backend="cpu", threads=1, block_size=8, pipeline_parallel_size=2,
        log_format="json", instance=InstanceConfig(number=2, listen=""),
    )
    config = RankConfig(engine=engine, kv_blocks=8, patience_s=1e300)
    try:
        ProcessTransport(config).start()
    except ConfigError as error:
        print(error)
"""


@pytest.mark.long
def test_worker_log_lines_have_the_numbers_of_rank_and_instance() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert "failed while starting" in done.stdout
    # both workers fail alike, and the second may be ended before it has logged that
    line, *_ = (json.loads(line) for line in done.stderr.splitlines())
    assert (line["level"], line["message"]) == ("error", f"worker {line['worker']} cannot go on")
    assert (line["instance"], line["worker"] in (0, 1)) == (2, True)
    assert line["exception"].startswith("Traceback")
