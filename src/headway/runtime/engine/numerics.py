"""Environment variables for numerical libraries, unless the user's environment sets them."""

from __future__ import annotations

import os

NUMERICS = {
    # Threads that wait for each other spin for some tenths of a millisecond, then sleep. Spinning on, the
    # default, makes a prefill up to three times slower as soon as one other process is busy on two cores; not
    # spinning at all doubles the time of a decode step on an idle machine. A tenth of this adds 15% and more to
    # it (reference checkpoint in fp32, Xeon with AVX-512); beside a busy process it takes a tenth off, and adds
    # 7% to a pass of 256 rows.
    "GOMP_SPINCOUNT": "10000",
    # oneDNN keeps about 1.6 MB a shape of matrix product, for 1,024 shapes; chunks have any number of rows.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
    # Weights and KV lie in pages of 2 MiB, where the system gives them out on request: a prefill of 2,048 rows takes
    # 4 to 7% less time, attention of a decode at 16K tokens 10% less.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Environment variables of a process that computes. They only work when set before torch is imported."""


def settle() -> None:
    """Apply `NUMERICS` to this process, for commands that compute in their own."""
    for name, value in NUMERICS.items():
        os.environ.setdefault(name, value)
