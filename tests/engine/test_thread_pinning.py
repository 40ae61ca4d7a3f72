"""Threads of torch's own are bound for one iteration after a pause, and to nothing afterwards."""

import os
import subprocess
import sys

import pytest

from headway.core.cpu_affinity import CORES

SCRIPT = """
import os, threading
from headway.core.cpu_affinity import CORES
from headway.runtime.executor.thread_pinning import PAUSE_S, ThreadPinning
import torch

def cores(): return {int(t): tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}

torch.set_num_threads(2)
stranger = threading.Event(); threading.Thread(target=stranger.wait, daemon=True).start()
before = set(cores())
team = ThreadPinning(2)
work = torch.zeros(1 << 20)
seen = []
for now in (PAUSE_S, PAUSE_S * 3 / 2, PAUSE_S * 3):
    late = threading.Event(); threading.Thread(target=late.wait, daemon=True).start()
    team.begin(now); work.add_(1.0); seen.append(cores()); team.end(now); after = cores()
    assert set(after.values()) == {CORES}, after
me = threading.get_native_id()
os.sched_setaffinity(0, CORES[-1:])
team.begin(PAUSE_S * 5); team.end(PAUSE_S * 5)
print(os.sched_getaffinity(0) == {CORES[-1]})
first, soon, later = seen
print(set(first.values()) == {CORES})
print(set(soon.values()) == {CORES})
print(later[me] == CORES[: len(CORES) // 2])
bound = {thread for thread, own in later.items() if own != CORES}
print(len(bound), me in bound, not (bound - {me}) & before, len({later[one] for one in bound}))
"""


def run(**environment: str) -> list[str]:
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert not made.stderr, made.stderr
    return made.stdout.splitlines()


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_each_thread_has_cores_of_its_own_after_a_pause_and_all_of_them_otherwise() -> None:
    assert run() == ["True", "True", "True", "True", "2 True True 2"]


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_nothing_is_pinned_where_the_user_has_pinned_threads() -> None:
    assert run(KMP_AFFINITY="none") == ["True", "True", "True", "False", "0 False True 0"]
