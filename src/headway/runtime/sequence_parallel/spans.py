"""An instance's part in span tasks: prompts computed by several instances together, KV in this instance's own pool.

Ranks of a task's group are ends (`runtime.engine.protocol`): the instances themselves, or all tensor-parallel
ranks of each. This module keeps the KV of its own rows, sends tensors to peers, and samples the first token; the steps
of a chunk are in the other modules of `runtime.sequence_parallel`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.core.batch import EmittedToken
from headway.core.errors import ConfigError, InvariantError
from headway.core.request import SamplingParams, SpanTask
from headway.kv.allocator import cut_ranges
from headway.runtime.engine.protocol import ComputeSpan, SpanTaskPaused, end_of, instance_of
from headway.runtime.executor.worker import ModelWorker, RequestTokens, sampler_of
from headway.runtime.kv_transfer.peers import PeerNetwork, PeerStream, PeerTicket
from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.sampling import sample
from headway.runtime.sequence_parallel.attention import KvShard, MessageStream, Runs
from headway.runtime.sequence_parallel.layout import ChunkSpec, KvLayout, Order, SpGroup, layout_after, pieces
from headway.runtime.sequence_parallel.prefill import SequencePrefill

SlotAllocator = Callable[[int, bool], Sequence[tuple[int, int]]]
"""(slots, replace) to slot ranges of the pool: the request's own, extended, or, if `replace`, other ones. May block;
raises where the pool has none."""


def chunks_of(run: SpanTask, preemptible: bool = False, tp: int = 1) -> tuple[ChunkSpec, ...]:
    """Return the chunks of a span task, in order, for instances of `tp` ranks: equal on all of them.

    Placement is that of the strategy where it names one (`striped`, `contiguous`), on the first member for tokens that
    are decoded in place, and otherwise zigzag, which for one member is the order of tokens.
    """
    attn = run.strategy.attn
    order: Order = "first" if run.in_place else attn if attn in ("striped", "contiguous") else "zigzag"
    group = SpGroup(_ends(run.group, tp), tp, None if run.node is None else run.node * tp)
    keepers = _ends(run.keepers, tp)
    spec = ChunkSpec(run.start, run.end, group, run.strategy, order, preemptible, run.in_place, keepers)
    return pieces(spec, run.rows)


def _ends(instances: Sequence[int], tp: int) -> tuple[int, ...]:
    return tuple(end_of(instance, rank) for instance in instances for rank in range(tp))


@dataclass(frozen=True)
class StoredKv:
    """KV of a request on this instance."""

    layout: KvLayout
    shard: KvShard
    layers: int
    """Layers whose KV has this layout."""
    whole: int
    """While a chunk is under way: the prompt's first tokens of which KV of all layers is in place."""


class SpanExecutor:
    """Computes span tasks on a worker: an instance's only process, or one of its tensor-parallel ranks.

    Requests are named as in messages; methods must not be called with unknown names. No wait is unbounded: a lost peer
    raises PeerLostError, and `look` may end any wait by raising. After an error the request must be forgotten.
    """

    def __init__(
        self, worker: ModelWorker, peers: PeerNetwork, eos: tuple[int, ...], config: DecoderConfig | None = None
    ) -> None:
        """config: the whole model's; None: the worker has all of it."""
        self._worker, self._peers, self._eos = worker, peers, eos
        self._config, self._tp = config or worker.decoder.config, worker.decoder.shard.ranks
        self._parts: dict[str, _SpanMember] = {}

    def admit(self, name: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...]) -> None:
        """Store a request's tokens: its prompt, and the output tokens that were emitted before."""
        sampler = sampler_of(prompt, params, self._worker.decoder.config.vocab_size, self._eos)
        resident = RequestTokens(prompt.nbytes // 4, prompt, sampler)
        for token in output:
            resident.count()
            resident.append(token)
        self._parts[name] = _SpanMember(self._worker, self._config, resident)

    def begin(self, compute: ComputeSpan, allocate_slots: SlotAllocator, look: Callable[[], None]) -> None:
        """Prepare a span task.

        look: called periodically during waits and within layers; an exception from it ends the task. Raises ConfigError
        where the task does not fit the model, the group or the KV held here.
        """
        name, run, tp = compute.id, compute.run, self._tp
        part = self._parts[name]
        # Raises PeerLostError here if an instance of the group is lost already.
        self._peers.line(name, run.group)
        for instance in run.group:
            if (ranks := self._peers.ranks_of(instance)) != tp:
                raise ConfigError(f"group {run.group}: instance {instance} is {ranks} processes, and this one is {tp}")
        chunks = chunks_of(run, compute.preemptible, tp)
        line = self._peers.line(name, chunks[0].group.ranks)
        earlier = [chunks_of(one, tp=tp) for one in compute.before]
        part.draws = compute.last
        transport = _PeerTransport(self._peers.number, line, look)
        part.begin(chunks, earlier, compute.drawn, transport, allocate_slots, compute.cached_slots)

    def go(self, name: str, pause: Callable[[], bool] | None, behind: Callable[[int], None]) -> bool:
        """Compute from where the task stands. Returns False when it was paused.

        behind: called after each layer of each chunk with the number of its completed layers. A pause requested in the
        last layer of a chunk takes effect before the next chunk.
        """
        part = self._parts[name]
        prefill, transport = part.prefill, part.transport
        assert transport is not None
        while prefill.run(pause=pause, behind=behind, look=transport.look):
            if part.last_chunk:
                return True
            asked = prefill.asked
            part.next_chunk()
            if asked:
                return False
        return False

    def finish(self, name: str) -> tuple[EmittedToken | None, bool]:
        """Complete the task after its last layer. Returns the sampled token, if any, and whether KV changed its place.

        If KV has moved to other slots, the old ones are free.
        """
        part = self._parts[name]
        logits = part.prefill.finish()
        emitted = None
        if part.draws and logits is not None:
            emitted = part.draw(name, logits)
        return emitted, part.settle()

    def saved(self, name: str, index: int) -> SpanTaskPaused:
        """Return where task `index` is paused, and the bytes kept here."""
        return self._parts[name].saved(name, index)

    def kept(self, name: str) -> StoredKv | None:
        """Return the KV of a request on this rank; None if there is none."""
        part = self._parts.get(name)
        return None if part is None else part.kept(self._worker.pool.layers)

    def whole_tokens(self, name: str) -> int:
        """Return how many of the request's first tokens have all their KV here, in order and without others; else 0."""
        part = self._parts.get(name)
        return 0 if part is None else part.whole_tokens(instance_of(self._peers.number), self._peers.number)

    def check(self, name: str) -> None:
        """Raise PeerLostError when a member of the current task's group is lost."""
        transport = self._parts[name].transport
        if transport is not None:
            transport.check()

    def forget(self, name: str) -> None:
        """Drop a request. Its slots may be reused once `peers.forget` has returned too."""
        self._parts.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._parts


class _SpanMember:
    """State of one request's span tasks on this rank."""

    def __init__(self, worker: ModelWorker, config: DecoderConfig, resident: RequestTokens) -> None:
        self._worker, self._resident = worker, resident
        self._prefill: SequencePrefill | None = None
        self._shard: KvShard | None = None
        self._moved = self.draws = False
        self._allocate_slots: SlotAllocator | None = None
        # `_slots`: slots of the pool held. `_own`: tokens held here at the end of a task of several chunks.
        self._slots = self._own = 0
        self._config = config
        self._chunks: deque[ChunkSpec] = deque()
        """Remaining chunks of the current task, the current one first."""
        self._moves = False
        """Whether the current chunk moves KV of earlier tasks. Only the first chunk of a task does."""
        self.transport: _PeerTransport | None = None

    @property
    def prefill(self) -> SequencePrefill:
        assert self._prefill is not None
        return self._prefill

    def begin(
        self,
        chunks: Sequence[ChunkSpec],
        before: Sequence[Sequence[ChunkSpec]],
        drawn: tuple[int, ...],
        transport: _PeerTransport,
        allocate_slots: SlotAllocator,
        cached: Runs,
    ) -> None:
        self.transport, self._allocate_slots = transport, allocate_slots
        if self._prefill is None:
            self._prefill = SequencePrefill(self._worker.decoder, self._config, transport, self._place)
        self._prefill.travel(transport)
        held = self._prefill.held
        if not held:
            for one in before:
                held = layout_after(one, held, self._config)
        own = held.get(transport.rank)
        # KV that the instance's scheduler computed: its slots are wrapped as a shard, not moved.
        if self._shard is None and own is not None and len(own.positions):  # a scheduler has left it
            taken = self._place(len(own.heads), len(own.positions))
            self._prefill.attach(held, taken)
            if cached:
                # Copied, not shared: a later task may move the request's KV within its slots.
                taken.copy(KvShard(self._worker.pool, cached), len(own.positions))
        resident, start, end = self._resident, chunks[0].start, chunks[-1].end
        # Without the tokens before them, sampled tokens cannot be appended; the check below then fails.
        if drawn and resident.known >= end - len(drawn):
            resident.learn(end - len(drawn), drawn)
        if resident.known < end:
            raise ConfigError(f"run [{start}, {end}): {resident.known} tokens are known here")
        self._own = 0
        if len(chunks) > 1 and transport.rank in chunks[0].group.ranks:
            at_end = layout_after(chunks, held, self._config)[transport.rank]
            # Slots for the whole task at once: a later chunk then never waits for room while peers wait for this rank.
            self._own = len(at_end.positions)
            shard = self._shard
            if shard is not None and shard.pool.kv_heads == len(at_end.heads) and shard.capacity < self._own:
                self._place(len(at_end.heads), self._own)  # the first chunk may fit what is there, and a later one not
        self._chunks = deque(chunks)
        self._moves = True
        self._take_up(held)

    def _take_up(self, held: KvLayout) -> None:
        """Begin the first remaining chunk. Only a task's last chunk computes logits, of its last token."""
        spec = self._chunks[0]
        # None: the last token's logits; an empty tuple: none.
        wanted = None if len(self._chunks) == 1 else ()
        self.prefill.begin(spec, self._resident.tokens(spec.start, spec.tokens), wanted, held)

    @property
    def last_chunk(self) -> bool:
        """Whether the current chunk is the task's last."""
        return len(self._chunks) == 1

    def next_chunk(self) -> None:
        """Complete the current chunk, and begin the next one."""
        self.prefill.finish()
        self._chunks.popleft()
        self._moves = False
        self._take_up(self.prefill.held)

    def saved(self, name: str, index: int) -> SpanTaskPaused:
        """See `SpanExecutor.saved`."""
        kv_bytes, activation_bytes, at_end = self.prefill.saved
        assert self._shard is not None
        return SpanTaskPaused(
            id=name,
            index=index,
            tokens=self._chunks[0].start,
            layer=self.prefill.layer,
            kv_bytes=kv_bytes,
            activation_bytes=activation_bytes,
            kv_bytes_at_end=max(at_end, self._shard.token_bytes * self._config.layers * self._own),
        )

    def _place(self, heads: int, tokens: int) -> KvShard:
        """Return slots of the pool for so many heads of a task's tokens.

        The present slots are extended, unless they hold another number of heads. With fewer heads than the pool has,
        several tokens share one slot of the pool.
        """
        pool = self._worker.pool
        fold = pool.kv_heads // heads
        # Ceiling division: `fold` tokens of few heads fill one slot of the whole pool.
        slots = -(-max(tokens, self._own) // fold)
        assert self._allocate_slots is not None
        shard = self._shard
        replace = shard is None or shard.pool.kv_heads != heads
        runs = self._allocate_slots(slots, self._shard is not None and replace)
        if shard is None or replace:
            self._moved = self._shard is not None
            shard = self._shard = KvShard(pool if fold == 1 else pool.narrowed(heads), ())
            self._slots = 0
        # `_room` returns all slots of the request; only those behind the ones already held are new.
        capacity = sum(count for _, count in runs)
        fresh = cut_ranges(runs, self._slots, capacity)
        self._slots = capacity
        shard.extend(pool.narrow_ranges(heads, fresh))
        return shard

    def settle(self) -> bool:
        moved, self._moved = self._moved, False
        return moved

    def draw(self, name: str, logits: Tensor) -> EmittedToken:
        resident = self._resident
        if resident.sampler is None:
            raise InvariantError(f"{name} has no sampler here")
        (drawn,) = sample(logits, [resident.sampler], [resident.known])
        resident.count()
        resident.append(drawn.token)
        return EmittedToken(name, drawn.token, drawn.logprobs)

    def kept(self, layers: int) -> StoredKv | None:
        prefill = self._prefill
        if prefill is None or self._shard is None:
            return None
        after = prefill.after
        if after is None:
            return StoredKv(prefill.held, self._shard, layers, 0)
        return StoredKv(after, self._shard, prefill.layer, 0 if self._moves else self._chunks[0].start)

    def whole_tokens(self, instance: int, end: int) -> int:
        prefill = self._prefill
        if prefill is None or prefill.after is not None or set(map(instance_of, prefill.held)) != {instance}:
            return 0
        held = prefill.held[end]
        whole = len(held.heads) == self._worker.pool.kv_heads
        return len(held.positions) if whole and bool((held.positions[1:] > held.positions[:-1]).all()) else 0


class _PeerTransport:
    """`TensorTransport` over the sockets between instances, for one span task."""

    def __init__(self, rank: int, line: PeerStream, look: Callable[[], None]) -> None:
        self.rank, self.look = rank, look
        self._line = line

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], stream: MessageStream
    ) -> Callable[[], None]:
        """See `TensorTransport.exchange`."""
        line = self._line
        # Receives first, so that incoming data finds its buffer.
        tickets: list[PeerTicket] = [line.expect(rank, stream, _bytes(tensor)) for rank, tensor in receives]
        tickets += [line.send(rank, stream, _bytes(tensor)) for rank, tensor in sends]

        def wait() -> None:
            for ticket in tickets:
                ticket.wait(self.look)

        return wait

    def check(self) -> None:
        """Raise PeerLostError when another rank of the group is lost."""
        self._line.check()


def _bytes(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory without copying."""
    return tensor.view(-1).view(torch.uint8).numpy().data
