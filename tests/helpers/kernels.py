"""Each set of compiled bf16 kernels that this processor can run, in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headway.runtime.attention.native import CompiledKernels, build_library, kernels

HERE = kernels()
WAYS = () if HERE is None else ("vectors", "tiles") if HERE.tiles else ("vectors",)
_USERS = ("attention.native", "attention.backend", "attention.cpu")


def use_kernels(way: str) -> Iterator[None]:
    """Compute by vectors or by AMX's tiles until the generator goes on."""
    library = build_library()
    assert library is not None
    chosen = CompiledKernels(library, way == "tiles")
    with pytest.MonkeyPatch.context() as patch:
        for user in _USERS:
            patch.setattr(f"headway.runtime.{user}.kernels", lambda: chosen)
        yield
