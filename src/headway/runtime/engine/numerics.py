"""Environment variables for numerical libraries, unless the user's environment sets them."""

from __future__ import annotations

import os

NUMERICS = {
    # Threads spin for some microseconds and then sleep while they wait for each other. Spinning on, as is the default,
    # makes a prefill three times slower as soon as one other process is busy on two cores; not spinning at all doubles
    # the time of a decode step on an idle machine.
    "GOMP_SPINCOUNT": "1000",
    # oneDNN keeps about 1.6 MB a shape of matrix product, for 1,024 shapes; chunks have any number of rows.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
}
"""Environment variables of a process that computes. They only work when set before torch is imported."""


def settle() -> None:
    """Apply `NUMERICS` to this process, for commands that compute in their own."""
    for name, value in NUMERICS.items():
        os.environ.setdefault(name, value)
