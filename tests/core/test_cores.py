import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import cores


@given(count=st.integers(1, 64), parts=st.integers(1, 80))
def test_shares_are_neighbours_as_equal_as_can_be(count: int, parts: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cores, "CORES", tuple(range(100, 100 + count)))
        shares = cores.shares(parts)
    assert len(shares) == parts
    if parts <= count:
        assert [core for share in shares for core in share] == list(range(100, 100 + count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {core for share in shares for core in share} == set(range(100, 100 + count))
        assert all(len(share) == 1 for share in shares)


def test_a_thread_is_not_bound_with_the_one_that_starts_it() -> None:
    before = os.sched_getaffinity(0)
    found: list[set[int]] = []
    os.sched_setaffinity(0, {min(before)})
    try:
        cores.start(lambda: found.append(os.sched_getaffinity(0)), "free").join()
    finally:
        os.sched_setaffinity(0, before)
    assert found == [set(cores.CORES)]
    assert all(thread.name != "free" for thread in threading.enumerate())


def test_cores_are_those_of_the_process_before_torch_binds_its_threads() -> None:
    code = (
        "import headway.cli.engine_process, sys, os;"
        "from headway.core.cores import CORES;"
        "assert 'torch' not in sys.modules;"
        "print(CORES == tuple(sorted(os.sched_getaffinity(0))))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
