"""Run by `test_device_placement`: is every tensor where it has to be when ranks compute on another device than the CPU?

Asked of torch's fake tensors, which have a device, refuse operations over two of them, and hold no numbers. The device
is one that torch lets Python make up; where the product asks for "cuda" by name, it is told that this is it.

usage: python -m tests.parallel.device_placement FOLDER FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.greedy_reference import prompt_of
from tests.parallel.rank_serving import Ask, make_core, serve
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from headway.perf.hardware import ParallelLayout
from headway.runtime.assembly.single_process import SingleProcessExecutor
from headway.runtime.attention.backend import BatchSegment
from headway.runtime.attention.backends import SdpaBackend
from headway.runtime.executor import rank as gloo
from headway.runtime.executor import worker as worker_module
from headway.runtime.executor.measure import measure
from headway.runtime.executor.plans import place_of
from headway.runtime.executor.rank import GlooLinks
from headway.runtime.executor.worker import GroupAttention, ModelWorker, RemoteQuery, RemoteRows
from headway.runtime.model.loading import CheckpointReader, load_decoder
from headway.runtime.model.sampling import SampledToken

BLOCKS, BLOCK = 64, 8
DEVICE = "made_up:0"


class Peers:
    """`PeerLinks` that answer at once, and a `TensorGroup` of one."""

    def __init__(self) -> None:
        self.sent = 0

    def expect_from(self, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        return lambda: torch.empty(shape, dtype=dtype, device=DEVICE)

    def send_to(self, group: int, x: Tensor) -> None:
        assert x.is_contiguous()
        assert str(x.device) == DEVICE
        self.sent += 1

    def sum_(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor | None:
        return x.cpu()


def made(folder: str, group: Peers | None = None) -> ModelWorker:
    decoder = load_decoder(folder, device=DEVICE, backend=SdpaBackend(), group=group)
    worker = ModelWorker(decoder, BLOCKS, BLOCK, ())
    assert str(worker.pool.data.device) == DEVICE
    return worker


def mixtures_are_found() -> None:
    with pytest.raises(RuntimeError, match="two devices"):
        torch.empty(3, 4, device=DEVICE).index_select(0, torch.tensor([1]))


def serving(folder: str, group: Peers | None) -> None:
    """Chunks over histories, decodes alone and together, and prompts that end in the midst of a batch."""
    wanted = DEVICE if group is None else "cpu"

    def sample(logits: Tensor, states: Sequence[Any], positions: Sequence[int]) -> list[SampledToken]:
        assert str(logits.device) == wanted
        return [SampledToken(5, None) for _ in states]

    worker_module.sample = sample  # type: ignore[attr-defined]
    asks = [Ask(prompt_of(1, 120), 3), Ask(prompt_of(2, 20), 4, 1), Ask(prompt_of(3, 3), 5, 2)]
    got = serve(make_core(SingleProcessExecutor(made(folder, group)), BLOCKS, BLOCK), asks)
    assert [len(tokens) for tokens in got] == [3, 4, 5]


def measuring(folder: str) -> None:
    worker, peers = made(folder), Peers()
    worker.decoder.backend = GroupAttention(worker.decoder.backend, peers, worker.decoder.config.q_heads)
    for kind, first, second in (("chunk", 8, 16), ("decodes", 3, 5), ("forward", 4, 0), ("ask", 2, 1), ("visit", 2, 0)):
        assert measure(worker, kind, first, second, 1) >= 0.0
    assert peers.sent


def rows_that_others_attend(folder: str) -> None:
    """Of a chunk and of decodes, some shared and some not, and guests' rows beside them."""
    worker, peers = made(folder), Peers()
    config, pool = worker.decoder.config, worker.pool
    backend = GroupAttention(SdpaBackend(), peers, config.q_heads)
    segments = [BatchSegment(0, 1, 7, ((0, 8),)), BatchSegment(1, 1, 3, ((8, 8),)), BatchSegment(2, 5, 9, ((16, 16),))]
    visits = [RemoteRows(2, 3, [(40, 9), (60, 2)]), RemoteRows(2, 1, [(80, 4)])]
    with torch.inference_mode():
        plan = backend.share(segments, pool, [RemoteQuery(1, (segments[0], segments[2]))], visits)
        for layer in range(pool.layers):
            q, k, v = (
                torch.empty(7, heads, config.head_dim, device=DEVICE)
                for heads in (config.q_heads, config.kv_heads, config.kv_heads)
            )
            out = backend.run(layer, q, k, v, plan)
            assert str(out.device) == DEVICE
            assert out.shape == q.shape
    assert peers.sent == 2 * pool.layers


def messages_go_through_host_memory() -> None:
    class Work:
        def wait(self) -> None:
            pass

    def message(x: Tensor, rank: int, tag: int) -> Work:
        assert x.device.type == "cpu"
        return Work()

    dist.isend = dist.irecv = message  # type: ignore[assignment]
    gloo._tensor_groups = lambda mine, backend: None
    layout = ParallelLayout(tp=2, stages=3, kvp=2)
    links = [GlooLinks(place_of(layout, rank), 8, torch.float32, torch.device(DEVICE)) for rank in (2, 3)]
    for one in links:
        x = torch.empty(4, 8, device=DEVICE)
        assert str(one.expect_rows(4)().device) == DEVICE
        assert str(one.expect_from(1, (4, 8), torch.float32)().device) == DEVICE
        one.send_rows(x)
        one.send_to(1, x)
    whole = links[0].gather(torch.empty(4, 5, device=DEVICE), [5, 3])
    assert whole is not None
    assert whole.shape == (4, 8)
    assert links[1].gather(torch.empty(4, 3, device=DEVICE), [5, 3]) is None


def main(folders: list[str]) -> None:
    _setup_privateuseone_for_python_backend("made_up")
    taken = CheckpointReader.take

    def take(self: CheckpointReader, *args: Any, **kwargs: Any) -> Tensor:
        with unset_fake_temporarily():
            return taken(self, *args, **kwargs)

    CheckpointReader.take = take  # type: ignore[method-assign]
    plain = torch.tensor

    def tensor(data: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """Without numbers: torch would take these to the device before its fake tensors hear of it."""
        made = plain(data, **kwargs)
        return torch.empty(made.shape, dtype=made.dtype, device=device or "cpu")

    torch.tensor = tensor  # type: ignore[assignment]
    with FakeTensorMode(allow_non_fake_inputs=True):
        mixtures_are_found()
        for folder, group in zip(folders, (None, Peers()), strict=True):
            serving(folder, group)
        measuring(folders[0])
        rows_that_others_attend(folders[0])
        messages_go_through_host_memory()


if __name__ == "__main__":
    main(sys.argv[1:])
    print("every tensor is where it has to be")
