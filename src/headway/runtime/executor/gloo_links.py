"""Links over torch.distributed: ranks of one host or of several, on CPU or on CUDA devices.

Messages from one rank to another go over gloo, from host memory to host memory. On CUDA devices, NCCL carries only the
sums of ranks that share layers: it would delay a message sent behind one that is still waited for, which the early
posting of receives relies on not happening.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from headway.perf.latency.layout import ParallelLayout
from headway.runtime.executor.rank_layout import RankPosition, places
from headway.runtime.launcher.network import address_towards, interface_of

_ROWS, _TOKENS, _LOGITS, _PEERS = 1, 2, 3, 4
"""Tags, so that messages of one kind never meet those of another."""


class GlooLinks:
    """`RankLinks` over the default process group; made after `join`.

    hidden, dtype: width and type of the rows that stages pass on. device: the device of this rank.
    """

    def __init__(
        self,
        place: RankPosition,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self._place = place
        self._device = device
        self._hidden, self._dtype = hidden, dtype
        stages = place.layout.stages
        self._before = place.at_stage(place.stage - 1).rank if place.stage else None
        self._behind = place.at_stage(place.stage + 1).rank if place.stage + 1 < stages else None
        self._group = _tensor_groups(place, "nccl" if device.type == "cuda" else "gloo")
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._answered: deque[tuple[Any, Tensor]] = deque()
        # At most `stages` batches are in flight, each with at most tp + 2 messages: rows, logits, tokens to tp readers.
        self._most = (stages + 1) * (place.layout.tp + 2)

    def sum_(self, x: Tensor) -> Tensor:
        """See `TensorGroup.sum_`."""
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        """See `TensorGroup.gather`."""
        ranks = self._place.stage_ranks
        if self._place.tp:
            self._send(x.contiguous(), ranks[0], _LOGITS)
            return None
        x = x.cpu()
        parts = [x, *(x.new_empty(x.shape[0], width) for width in widths[1:])]
        # All receives are posted before the first is waited for.
        for work in [_asked(part, rank, _LOGITS) for part, rank in zip(parts[1:], ranks[1:], strict=True)]:
            work.wait()
        return torch.cat(parts, dim=1)

    def expect_rows(self, rows: int) -> Callable[[], Tensor]:
        """See `RankLinks.expect_rows`."""
        assert self._before is not None, "no stage is before the first one"
        hidden = torch.empty(rows, self._hidden, dtype=self._dtype)
        work = _asked(hidden, self._before, _ROWS)

        def wait() -> Tensor:
            work.wait()
            return hidden.to(self._device)

        return wait

    def send_rows(self, hidden: Tensor) -> None:
        """See `RankLinks.send_rows`."""
        assert self._behind is not None, "no stage is behind the last one"
        self._send(hidden, self._behind, _ROWS)

    def expect_tokens(self, count: int) -> Callable[[], list[int]]:
        """See `RankLinks.expect_tokens`."""
        drawn = torch.empty(count, dtype=torch.int64)
        work = _asked(drawn, self._place.drawer.rank, _TOKENS)

        def wait() -> list[int]:
            work.wait()
            tokens: list[int] = drawn.tolist()
            return tokens

        return wait

    def send_tokens(self, tokens: list[int]) -> None:
        """See `RankLinks.send_tokens`."""
        drawn = torch.tensor(tokens, dtype=torch.int64)
        for reader in self._place.readers:
            self._send(drawn, reader.rank, _TOKENS)

    def expect_from(self, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        """See `PeerLinks.expect_from`."""
        x = torch.empty(shape, dtype=dtype)
        work = _asked(x, self._place.in_group(group).rank, _PEERS)

        def wait() -> Tensor:
            work.wait()
            return x.to(self._device)

        return wait

    def send_to(self, group: int, x: Tensor) -> None:
        """See `PeerLinks.send_to`. A send is waited for only when its buffer count exceeds two layers of all peers.

        By then its answer, or the queries that follow it, have been received, so the wait returns at once.
        """
        x = x.cpu()
        work = dist.isend(x, self._place.in_group(group).rank, tag=_PEERS)
        assert work is not None
        self._answered.append((work, x))
        while len(self._answered) > 4 * self._place.layout.kvp:
            done, _ = self._answered.popleft()
            done.wait()

    def close(self) -> None:
        """Release buffers. Connections end with the process: an orderly exit would wait for ranks that may be gone."""
        self._sent.clear()
        self._answered.clear()

    def _send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Begin to send. Old sends are only waited for when so many have followed that they are long complete."""
        tensor = tensor.cpu()
        work = dist.isend(tensor, rank, tag=tag)
        assert work is not None
        self._sent.append((work, tensor))
        while len(self._sent) > self._most:
            done, _ = self._sent.popleft()
            done.wait()


def join(rank: int, world: int, store: Store, timeout_s: float) -> None:
    """Become rank `rank` of `world`. Called once a process, by all of them."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s))


def local_rendezvous(folder: Path, timeout_s: float) -> FileStore:
    """Return the rendezvous store of ranks that are all on this host: a file in `folder`, which is this user's only.

    A store on a port of loopback would answer any user of the host.
    """
    store = FileStore(str(folder / "rendezvous"))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def rendezvous(host: str, port: int | None, timeout_s: float) -> TCPStore:
    """Return the rendezvous store of the ranks at (host, port). port None: create it, on a free port of `host`."""
    timeout = timedelta(seconds=timeout_s)
    if port is not None:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    # torch's own listening socket would accept on all interfaces.
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def choose_interface(host: str) -> None:
    """Have gloo use the network interface through which `host` is reached, unless GLOO_SOCKET_IFNAME names another.

    Called before `join`. By default gloo uses the interface of the address that this host's name resolves to.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_of(address_towards(host))
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _tensor_groups(mine: RankPosition, backend: str) -> Any:
    """Return this stage's process group; None without tensor parallelism."""
    layout: ParallelLayout = mine.layout
    own = None
    for place in places(layout):
        # torch requires that all ranks create all groups, in the same order, also those of other stages.
        if place.tp == 0 and layout.tp > 1:
            group = dist.new_group(list(place.stage_ranks), backend=backend)
            if place.stage_ranks == mine.stage_ranks:
                own = group
    return own


def _asked(tensor: Tensor, rank: int, tag: int) -> Any:
    work = dist.irecv(tensor, rank, tag=tag)
    assert work is not None
    return work
