"""What handing a request over adds between its first and its second token (asked: at most 10 ms for 16K tokens), and
how fast KV travels beside a memory copy.

Run: python benchmarks/hand_over.py [--model DIR] [--tokens 16384] [--repeats 5] [--threads 1] [--dtype float32]
[--tp 2 1]. Two instances, of so many tensor-parallel ranks (1 and 1), engine processes of `headway cluster` with
--threads threads for each rank, and this script in the router's place: it counts a token when its message has come.
Without --model, the embedded one. Kinds, taking turns:

alone      one instance prefills and decodes
chunks     the scheduler of one prefills, KV follows chunk by chunk, the other decodes
layers     one computes the prompt as a run, KV follows layer by layer, the other decodes
afterwards the scheduler of one prefills; KV is asked for with the first token, all of it at once: nothing overlaps

`gap` is from the first to the second token, `added` the difference of its median to that of `alone`. Of it, KV comes
so long behind the first token, and the other instance takes `decode` to say the second. The rate is that of
`afterwards`, from the first byte that comes to the last. What bounds it is memory: each byte is copied twice, in two
processes at once; beside it, what a bare socket moves between two threads, and a memory copy. `kv_transfer.py` measures
that without engines.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headway.core.sampling import SamplingParams
from headway.core.span import Strategy
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.engine_child import EngineChild
from headway.runtime.engine.instance_protocol import (
    ComputeSpan,
    KvArrived,
    MeetPeers,
    PeerAddress,
    ReserveKv,
    SendKv,
    SpanTask,
    SpanTaskDone,
)
from headway.runtime.engine.protocol import (
    AbortRequest,
    EngineInfo,
    FatalError,
    IterationOutputs,
    OutputDelta,
    SubmitRequest,
)

KINDS = ("alone", "chunks", "layers", "afterwards")
PREFILLS, DECODES = 0, 1
_encode = msgspec.msgpack.Encoder().encode


class Instance:
    """One engine process. `heard`: messages with the time at which they came."""

    def __init__(self, number: int, folder: Path, options: argparse.Namespace) -> None:
        config = EngineConfig(
            tensor_parallel_size=options.tp[number],
            model=str(options.model),
            dtype=options.dtype,
            max_model_len=options.tokens + 64,
            threads=options.threads,
            kv_cache_bytes=options.kv_mib << 20,
            latency_profile="quick",
            instance=InstanceConfig(number=number, listen=f"unix:{folder}/p{number}"),
        )
        self.number = number
        self.child = EngineChild(config, "headway.runtime.build.engine_process", folder, number)
        self.heard: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()

    async def start(self) -> EngineInfo:
        info = await self.child.receive()
        if not isinstance(info, EngineInfo):
            raise SystemExit(f"an instance cannot start: {info}")
        self._reader = asyncio.create_task(self._read())
        return info

    async def _read(self) -> None:
        while True:
            message = await self.child.receive()
            now = time.monotonic()
            if isinstance(message, FatalError):
                raise SystemExit(message.error)
            if isinstance(message, IterationOutputs):
                for delta in message.deltas:
                    self.heard.put_nowait((now, delta))
            else:
                self.heard.put_nowait((now, message))

    def tell(self, message: msgspec.Struct, *frames: bytes) -> None:
        self.child.send([_encode(message), *frames])

    async def hear(self, kind: type[Any], name: str) -> tuple[float, Any]:
        """The next message of a kind, or delta with tokens, about a request. Others are dropped."""
        while True:
            now, message = await self.heard.get()
            if getattr(message, "error", None) is not None:
                raise SystemExit(message.error)
            if type(message).__name__ == "RunLost":
                raise SystemExit(message.why)
            if isinstance(message, kind) and message.id == name:
                return now, message


class Bench:
    def __init__(self, instances: list[Instance], prompt: bytes, tokens: int) -> None:
        self.instances, self.prompt, self.tokens = instances, prompt, tokens
        self.params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4)

    def submit(self, on: int, name: str, phase: Any, output: tuple[int, ...] = ()) -> None:
        message = SubmitRequest(
            id=name, prompt_tokens=self.tokens, params=self.params, received_s=time.monotonic(), phase=phase,
            output=output,
        )  # fmt: skip
        self.instances[on].tell(message, self.prompt)

    async def token(self, on: int, name: str) -> tuple[float, int]:
        while True:
            now, delta = await self.instances[on].hear(OutputDelta, name)
            if delta.tokens:
                return now, delta.tokens[0]

    async def once(self, kind: str, name: str) -> dict[str, Any]:
        """One request: seconds between its tokens, what they are, and how its KV came."""
        first, second = self.instances
        found: dict[str, Any] = {}
        began_s = time.monotonic()
        if kind == "alone":
            self.submit(PREFILLS, name, "all")
            first_s, one = await self.token(PREFILLS, name)
            second_s, two = await self.token(PREFILLS, name)
        else:
            second.tell(ReserveKv(name, self.tokens))
            await second.hear(ReserveKv, name)
            send = SendKv(id=name, piece=1, start=0, end=self.tokens, to=DECODES)
            if kind == "layers":
                self.submit(PREFILLS, name, "spans")
                run = SpanTask(0, self.tokens, (PREFILLS,), Strategy(attn="ring"))
                first.tell(ComputeSpan(id=name, index=0, run=run, last=True))
                first.tell(send)
                first_s, done = await first.hear(SpanTaskDone, name)
                one = done.delta.tokens[0]
            else:
                self.submit(PREFILLS, name, "prefill")
                if kind == "chunks":
                    first.tell(send)
                first_s, one = await self.token(PREFILLS, name)
                if kind == "afterwards":
                    first.tell(send)
            came_s, arrived = await second.hear(KvArrived, name)
            asked_s = time.monotonic()
            self.submit(DECODES, name, "decode", (one,))
            second_s, two = await self.token(DECODES, name)
            found |= {
                "wait": came_s - first_s,
                "transfer": arrived.ended_s - arrived.began_s,
                "decode": second_s - max(asked_s, first_s),
            }
        for instance in self.instances:
            instance.tell(AbortRequest(name))
        await asyncio.sleep(0.2)
        return found | {"gap": second_s - first_s, "tokens": (one, two), "prefill": first_s - began_s}


def copy_rate(megabytes: int) -> float:
    """Bytes per second of a memory copy by one thread: the median of several."""
    source = np.ones(megabytes << 20, dtype=np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(times[1:])


def socket_rate(megabytes: int) -> float:
    """Bytes per second from one thread to another over a Unix socket like those between instances: the median."""
    source, target = np.ones(megabytes << 20, dtype=np.uint8), np.empty(megabytes << 20, dtype=np.uint8)
    near, far = socket.socketpair(socket.AF_UNIX)
    for end in (near, far):
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, name, 4 << 20)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        writer = threading.Thread(target=near.sendall, args=(source.data,))
        writer.start()
        at = 0
        while at < target.nbytes:
            at += far.recv_into(target.data[at:])
        writer.join()
        times.append(time.perf_counter() - start)
    near.close()
    far.close()
    return source.nbytes / statistics.median(times[1:])


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        instances = [Instance(number, Path(folder), options) for number in (PREFILLS, DECODES)]
        try:
            await _measure(instances, options)
        finally:
            for instance in instances:
                instance.child.end(at_once=True)


async def _measure(instances: list[Instance], options: argparse.Namespace) -> None:
    infos = [await instance.start() for instance in instances]
    table = tuple(
        PeerAddress(number, 0, info.peer_address or "", info.peer_others) for number, info in enumerate(infos)
    )
    for instance in instances:
        instance.tell(MeetPeers(table))
    info = infos[DECODES]
    token_bytes = info.kv_bytes // info.kv_tokens_total
    prompt = np.random.default_rng(0).integers(5, info.vocab_size, options.tokens, dtype=np.int32)
    bench = Bench(instances, prompt.tobytes(), options.tokens)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.kinds}
    await bench.once("chunks", "first")  # touches memory
    for turn in range(options.repeats):
        for kind in options.kinds:
            found[kind].append(await bench.once(kind, f"{kind}{turn}"))
    said = {one["tokens"] for kind in options.kinds for one in found[kind]}
    size = options.tokens * token_bytes
    print(
        f"{info.model}, {info.dtype}, {options.tokens} tokens, {size / 2**20:.1f} MiB of KV, "
        f"{options.tp[0]} rank(s) to {options.tp[1]}, {options.threads} thread(s) each, {options.repeats} repeats; "
        f"tokens equal: {len(said) == 1}"
    )
    print(
        "kind         prefill (s)  gap (ms): median  least   most   added   KV behind 1st token  decode  transfer (ms)"
    )
    base = None
    for kind, ones in found.items():
        gaps = [1e3 * one["gap"] for one in ones]
        middle = statistics.median(gaps)
        base = middle if base is None else base
        row = f"{kind:<12}{statistics.median(one['prefill'] for one in ones):>12.2f}{middle:>18.1f}"
        row += f"{min(gaps):>7.1f}{max(gaps):>7.1f}{middle - base:>8.1f}"
        if kind != "alone":
            row += f"{1e3 * statistics.median(one['wait'] for one in ones):>22.1f}"
            row += f"{1e3 * statistics.median(one['decode'] for one in ones):>8.1f}"
            row += f"{1e3 * statistics.median(one['transfer'] for one in ones):>15.1f}"
        print(row)
    if "afterwards" in found:
        wire = statistics.median(size / one["transfer"] for one in found["afterwards"])
        megabytes = max(16, size >> 20)
        bare, copied = socket_rate(megabytes), copy_rate(megabytes)
        print(
            f"wire {wire / 1e9:.2f} GB/s; a bare socket {bare / 1e9:.2f} GB/s ({wire / bare:.2f} of it), "
            f"a memory copy by one thread {copied / 1e9:.2f} GB/s ({wire / copied:.2f} of it)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--kv-mib", type=int, default=512)
    parser.add_argument("--tp", type=int, nargs=2, default=[1, 1], metavar=("PREFILL", "DECODE"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args()
    if options.tp[PREFILLS] > 1:  # several processes compute no runs
        options.kinds = [kind for kind in options.kinds if kind != "layers"]
    if options.model is None:
        import headway.runtime.embedded

        options.model = Path(headway.runtime.embedded.__file__).parent
    torch.set_num_threads(1)
    asyncio.run(measure(options))


if __name__ == "__main__":
    main()
