"""Threads of torch's own have a core each while they compute, and one computes where they have to wait for cores."""

import os
import subprocess
import sys

import pytest
import torch

from headway.core.machine import CORES
from headway.runtime.executor import measure
from headway.runtime.executor.measure import BACKOFF_S, WINDOW_S, ComputeThreads

SCRIPT = """
import os, threading
from headway.core.machine import CORES
from headway.runtime.executor.measure import ComputeThreads
import torch

def cores(): return {int(t): tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}

torch.set_num_threads(2)
stranger = threading.Event(); threading.Thread(target=stranger.wait, daemon=True).start()
before = set(cores())
team = ComputeThreads(2)
work = torch.zeros(1 << 20)
seen = []
me = threading.get_native_id()
for now in (1.0, 2.0, 3.0):
    late = threading.Event(); threading.Thread(target=late.wait, daemon=True).start()
    team.begin(now, 1000); work.add_(1.0); seen.append(cores()); team.end(now + 0.01); after = cores()
    assert after[me] == CORES, after
os.sched_setaffinity(0, CORES[-1:])
team.begin(5.0, 1000); team.end(5.1)
print(os.sched_getaffinity(0) == {CORES[-1]})
print(set(seen[0].values()) == {CORES})
for held in seen[1:]:
    bound = {thread for thread, own in held.items() if own != CORES}
    print(len(bound), me in bound, not (bound - {me}) & before, len({held[one] for one in bound}))
"""


def run(**environment: str) -> list[str]:
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert not made.stderr, made.stderr
    return made.stdout.splitlines()


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_each_computing_thread_has_a_core_and_no_other_thread_is_moved() -> None:
    assert run() == ["True", "True", "2 True True 2", "2 True True 2"]


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_nothing_is_pinned_where_the_user_has_pinned_threads() -> None:
    assert run(KMP_AFFINITY="none") == ["True", "True", "0 False True 0", "0 False True 0"]


class Machine:
    """Iterations in virtual time, of which each thread waits a share for its core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fixed: bool = False) -> None:
        self.now, self.waited, self.share = 100.0, 0.0, 0.0
        monkeypatch.setattr(measure, "_waits_s", lambda _: [self.waited, 0.0])
        monkeypatch.setattr(measure, "CORES", (0, 1))
        monkeypatch.setattr(ComputeThreads, "_find_helpers", lambda _: None)
        self.team = ComputeThreads(2, fixed)
        self.team._shares = [(0,), (1,)]

    def iterate(self, rows: float = 1000, seconds: float = 0.02) -> int:
        self.team.begin(self.now, rows)
        threads = torch.get_num_threads()
        self.now += seconds
        self.waited += self.share * seconds
        self.team.end(self.now)
        return threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(Counted, "threads", count))
    monkeypatch.setattr(torch, "get_num_threads", lambda: Counted.threads)
    return Machine(monkeypatch)


class Counted:
    threads = 2


def test_one_thread_computes_while_threads_wait_for_cores_and_more_are_tried_again(machine: Machine) -> None:
    assert {machine.iterate() for _ in range(50)} == {2}
    machine.share = 0.5
    steps = [machine.iterate() for _ in range(400)]
    assert steps.count(2) * 0.02 <= 8 * WINDOW_S + 1.0
    first = steps.index(1)
    assert first * 0.02 <= 2 * WINDOW_S
    assert set(steps[first : first + round(BACKOFF_S[0] / 0.02) - 1]) == {1}
    # Tried again ever more seldom, and at most BACKOFF_S[1] after the other work has gone.
    machine.share = 0.0
    until = machine.now + BACKOFF_S[1]
    while machine.now < until:
        machine.iterate()
    assert {machine.iterate() for _ in range(100)} == {2}


def test_waits_between_iterations_and_in_those_of_one_thread_do_not_count(machine: Machine) -> None:
    machine.team.few_rows = 16
    for _ in range(50):
        assert machine.iterate() == 2
        machine.share = 0.9
        assert machine.iterate(1) == 1
        machine.waited += 1.0
        machine.share = 0.0


def test_small_iterations_are_computed_by_one_thread(machine: Machine) -> None:
    machine.team.few_rows = 16
    assert [machine.iterate(rows) for rows in (1, 15, 16, 300, 2)] == [1, 1, 2, 2, 1]


def test_a_chosen_number_is_neither_measured_nor_changed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = Machine(monkeypatch, fixed=True)
    fixed.team.choose(lambda rows: pytest.fail("measured"))
    fixed.share = 0.9
    assert {fixed.iterate(rows) for rows in (1, 1000) for _ in range(100)} == {2}
    assert fixed.team.described() == "2 threads (set)"


@pytest.mark.parametrize(
    ("overhead_s", "waits", "keep", "wanted"),
    [
        (0.0, 0.0, False, "2 threads (measured: 2.0 times one on 1 row)"),
        (0.001, 0.0, False, "2 threads, 1 below 64 rows (measured: 1.3 times one on 64 rows)"),
        (0.008, 0.0, False, "2 threads, 1 below 256 rows (measured: 1.0 times one on 256 rows)"),
        (1.0, 0.0, False, "1 thread (measured: 0.0 times one on 256 rows)"),
        (1.0, 0.0, True, "2 threads, 1 below 16 rows (measured: 0.0 times one on 256 rows, as profiled)"),
        (1.0, 1.0, False, "2 threads, 1 below 16 rows (measured: 0.0 times one on 256 rows, beside other work)"),
    ],
)
def test_the_number_is_chosen_by_measured_times(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, overhead_s: float, waits: float, keep: bool, wanted: str
) -> None:
    """A row takes 64 us, by two threads half of that and an overhead; a clock that does not run otherwise."""
    monkeypatch.setattr(measure.time, "perf_counter", lambda: machine.now)  # type: ignore[attr-defined]
    monkeypatch.setattr(measure.time, "monotonic", lambda: machine.now)  # type: ignore[attr-defined]

    def work(rows: int) -> None:
        several = torch.get_num_threads() > 1
        seconds = rows * 64e-6 / (2 if several else 1) + (overhead_s if several else 0.0)
        machine.now += seconds
        machine.waited += waits * seconds

    machine.team.choose(work, 100.0, keep)
    assert machine.team.described() == wanted
    if waits:
        assert machine.iterate() == 1


def test_what_does_not_fit_the_time_is_taken_to_gain_more(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes 64 ms, by two threads half of that and 0.13 s."""
    monkeypatch.setattr(measure.time, "perf_counter", lambda: machine.now)  # type: ignore[attr-defined]
    monkeypatch.setattr(measure.time, "monotonic", lambda: machine.now)  # type: ignore[attr-defined]

    def work(rows: int) -> None:
        machine.now += rows * 0.064 if torch.get_num_threads() == 1 else rows * 0.032 + 0.13

    machine.team.choose(work, 0.6)
    assert machine.team.described() == "2 threads, 1 below 16 rows (measured: 1.0 times one on 4 rows)"
