"""What functions a cluster's request goes through until the first bytes of its KV are sent.

A hop is a function of Headway on the call stack at one of these points (`POINTS`): where the request reaches the
controller, its policy, and the record of a reservation; where a message about it leaves a process; where an instance
takes in its prompt, its span and the wish for its KV; and where the first KV is given to the connector. The controller
is over doubles of instances, the instance has a model. `python -m tests.helpers.request_hops` prints them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import zmq
from tests.helpers.cluster_clients import ask, prompt, running
from tests.helpers.fake_instances import FakeCluster
from tests.helpers.random_weights import random_decoder, reference_config
from tests.helpers.rank_serving import make_core
from tests.helpers.virtual_time import run

import headway
from headway.control.controller import ClusterController
from headway.core.request import SamplingParams, SpanTask
from headway.policy.placement.baselines import FixedSp
from headway.runtime.assembly.engine_process import WallClock
from headway.runtime.cluster.agent import InstanceAgent, KvConnectorScheduler
from headway.runtime.cluster.instances import LiveInstance
from headway.runtime.cluster.native_backend import LiveKvMigrations
from headway.runtime.engine.protocol import (
    ComputeSpan,
    EndProcess,
    PeerAddress,
    ReserveKv,
    SendKv,
    SubmitRequest,
    join_endpoints,
)
from headway.runtime.engine.service import EngineService
from headway.runtime.executor.single_process import SingleProcessExecutor
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.kv_transfer.local import PeerConnector
from headway.runtime.kv_transfer.peers import PeerNetwork
from headway.runtime.kv_transfer.port import KvPort
from headway.runtime.sequence_parallel.spans import SpanExecutor

POINTS: dict[type, tuple[str, ...]] = {
    ClusterController: ("arrive",),
    FixedSp: ("on_event",),
    LiveInstance: ("tell",),
    LiveKvMigrations: ("reserved",),
    SpanExecutor: ("admit", "begin"),
    KvPort: ("receive", "send"),
    EngineService: ("send",),
    PeerConnector: ("save_kv_layer",),
}
(_ROOT,) = headway.__path__
_INNER = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
BLOCK = 8


class Hop(NamedTuple):
    file: str
    """Below the package's folder."""
    function: str


class Visit(NamedTuple):
    """A call of one of `POINTS`."""

    point: str
    about: str
    """The type of its first argument."""
    stack: list[Hop]


def _stack() -> list[Hop]:
    """Return the functions of Headway on the stack of the caller's caller, outermost first."""
    found: deque[Hop] = deque()
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_ROOT) and not code.co_qualname.endswith(_INNER):
            found.appendleft(Hop(os.path.relpath(code.co_filename, _ROOT), code.co_qualname))
        frame = frame.f_back  # type: ignore[assignment]
    return list(found)


@contextmanager
def visits() -> Iterator[list[Visit]]:
    """Record all calls of `POINTS` meanwhile."""
    found: list[Visit] = []

    def watched(point: str, inner: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            end = Hop(os.path.relpath(inner.__code__.co_filename, _ROOT), inner.__qualname__)
            about = type(args[1]).__name__ if len(args) > 1 else ""
            found.append(Visit(point, about, [*_stack(), end]))
            return inner(*args, **kwargs)

        return call

    before = [(kind, name, getattr(kind, name)) for kind, names in POINTS.items() for name in names]
    for kind, name, inner in before:
        setattr(kind, name, watched(f"{kind.__name__}.{name}", inner))
    try:
        yield found
    finally:
        for kind, name, inner in before:
            setattr(kind, name, inner)


def controller_visits() -> list[Visit]:
    """A prompt that one instance computes and another decodes, until its KV is asked for."""
    found: list[Visit] = []

    async def main() -> None:
        async with running(FakeCluster(), ("prefill", "decode"), "fixed-sp", {"sp": 1}) as client:
            with visits() as seen:
                await ask(client, "r", prompt(1, 64))
            found.extend(seen)

    run(main())
    return _until(found, "SendKv")


def instance_visits(folder: Path) -> list[Visit]:
    """An instance that reserves room for a prompt, and computes another whose KV another instance waits for."""
    shape = reference_config(256)
    worker = ModelWorker(random_decoder(shape, torch.float32), 64, BLOCK, ())
    executor, clock = SingleProcessExecutor(worker), WallClock()
    core = make_core(executor, 64, BLOCK)
    core.info = msgspec.structs.replace(core.info, vocab_size=shape.vocab_size)
    here, there = (PeerNetwork(number, 0, f"unix:{folder}/{number}") for number in (0, 1))
    addresses = [PeerAddress(number, 0, f"unix:{folder}/{number}") for number in (0, 1)]
    for one in (here, there):
        one.meet(addresses)
    spans, connector = SpanExecutor(worker, here, ()), PeerConnector(here, lambda: None)
    moves = KvConnectorScheduler(core, KvPort(worker, BLOCK, spans, connector, 0), executor.replay, clock)
    agent = InstanceAgent(core, spans, here, clock, 5.0, moves)
    context = zmq.Context()
    server = context.socket(zmq.PAIR)
    server.bind(f"ipc://{folder}/e")
    service = EngineService(join_endpoints(f"ipc://{folder}/e", f"ipc://{folder}/b"), clock, lambda: True)
    ids = np.arange(64, dtype=np.int32).tobytes()
    encode, greedy = msgspec.msgpack.encode, SamplingParams(max_tokens=2)
    for name in ("reserved", "computed"):
        server.send_multipart([encode(SubmitRequest(id=name, prompt_tokens=64, params=greedy, phase="spans")), ids])
    server.send(encode(ReserveKv("reserved", 64)))
    server.send(encode(ComputeSpan(id="computed", index=0, run=SpanTask(0, 64, (0,)), last=True)))
    server.send(encode(SendKv(id="computed", piece=1, start=0, end=64, to=1)))
    server.send(encode(EndProcess()))
    with visits() as found:
        service.run(core, agent)
    service.close()
    connector.shutdown()
    here.close()
    there.close()
    context.destroy(linger=0)
    return _until(found, "SaveKv", "PeerConnector.save_kv_layer")


def _until(found: Sequence[Visit], about: str, point: str = "LiveInstance.tell") -> list[Visit]:
    ends = (at for at, each in enumerate(found) if (each.point, each.about) == (point, about))
    return list(found[: next(ends) + 1])


def hops(found: Sequence[Visit]) -> list[Hop]:
    """Return the different hops of these visits, in order."""
    return list(dict.fromkeys(hop for each in found for hop in each.stack))


def main() -> None:
    """Print each visit with its way, and how many functions and files lie on all of them."""
    with tempfile.TemporaryDirectory() as folder:
        seen = [*controller_visits(), *instance_visits(Path(folder))]
    for each in seen:
        print(f"{each.point}({each.about})", *(f"    {hop.file}: {hop.function}" for hop in each.stack), sep="\n")
    found = hops(seen)
    print(f"{len(found)} hops, {len({hop.file for hop in found})} files")


if __name__ == "__main__":
    main()
