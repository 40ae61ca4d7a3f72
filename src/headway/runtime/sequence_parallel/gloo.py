"""The transport over torch.distributed's gloo backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from headway.runtime.sequence_parallel.transport import MessageStream

_FIRST_TAG = 16
"""Tags below belong to `headway.runtime.executor.gloo_links`."""


class GlooTransport:
    """Made after `headway.runtime.executor.gloo_links.join`: ranks are the default process group's."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], stream: MessageStream
    ) -> Callable[[], None]:
        """See `TensorTransport.exchange`."""
        tag = _FIRST_TAG + stream
        works: list[Any] = [dist.irecv(tensor, rank, tag=tag) for rank, tensor in receives]
        works += [dist.isend(tensor, rank, tag=tag) for rank, tensor in sends]
        # Buffers must outlive the asynchronous operations.
        held = [tensor for _, tensor in (*sends, *receives)]

        def wait() -> None:
            for work in works:
                work.wait()
            held.clear()

        return wait
