"""One rank's part in the prefill of one prompt, chunk by chunk, on groups that grow; pauses fall between layers.

Called by an instance's worker.

For each chunk call `begin`, then `run` until it returns True, then `finish`; all ranks of the chunk's group make the
same calls with the same arguments. The KV that it leaves on the ranks is sent on by `runtime.cluster.agent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from headway.core.errors import ConfigError, InvariantError
from headway.runtime.attention.backend import AttentionBackend, AttentionPlan, BatchSegment
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.decoder import (
    DecoderModel,
    LayerWeights,
    Matrix,
    PackedLinear,
    RotaryTable,
    feed,
    heads,
    norm,
)
from headway.runtime.sequence_parallel.attention import (
    KvMoves,
    KvShard,
    MatrixRegisters,
    MessageStream,
    TensorTransport,
    attend_by_ring,
    attend_in_place,
    start_exchange,
)
from headway.runtime.sequence_parallel.layout import EMPTY, ChunkSpec, KvLayout
from headway.runtime.sequence_parallel.schedule import (
    LOGITS,
    ROWS,
    AddRows,
    AttendInPlace,
    ChunkPlan,
    ComputeLogits,
    EmbedTokens,
    ExchangeRows,
    FeedForward,
    FinishHistory,
    FinishWeights,
    NormRows,
    ProjectHeads,
    ProjectOutput,
    RankPlan,
    RingAttend,
    StartHistory,
    StartWeights,
    Step,
    WholeLayer,
)

# Interpreter of the steps of one chunk on one rank. Independent of the strategy, which determines the steps.


class StepExecutor:
    """One chunk on one rank. `shard` is where its KV goes, `history` what moves there first.

    `tokens`: the chunk's, from position `first` on. The registers that last between steps are in `registers`; between
    layers that is the residual stream alone.
    """

    def __init__(
        self,
        decoder: DecoderModel,
        config: DecoderConfig,
        transport: TensorTransport,
        shard: KvShard,
        history: KvMoves,
        tokens: Tensor,
        first: int,
    ) -> None:
        """config: the whole model's; the decoder's own may be a slice."""
        self.registers = MatrixRegisters()
        self._decoder, self._config, self._transport = decoder, config, transport
        self._shard, self._history = shard, history
        self._tokens, self._first = tokens, first
        self._kv_heads = shard.pool.kv_heads
        self._moved = 0
        self._moving: Callable[[], None] | None = None
        self._fetching: dict[str, Callable[[], Tensor]] = {}
        self._whole: dict[str, Tensor] = {}
        self._rotary: dict[int, RotaryTable] = {}
        self.look: Callable[[], None] = lambda: None
        """Called every so often while attention is computed, and behind it; what it raises ends the chunk."""
        self._handlers: Mapping[type[Step], Callable[..., None]] = {
            ExchangeRows: self._exchange,
            EmbedTokens: self._embed,
            NormRows: self._norm,
            ProjectHeads: self._heads,
            RingAttend: self._attend,
            AttendInPlace: self._attend_in_place,
            ProjectOutput: self._out,
            FeedForward: self._feed,
            AddRows: self._add,
            ComputeLogits: self._head,
            WholeLayer: self._layer_of,
            StartWeights: self._start_weights,
            FinishWeights: self._finish_weights,
            StartHistory: self._start_history,
            FinishHistory: self._finish_history,
        }

    def run(self, steps: Iterable[Step], layer: int) -> None:
        """Carry out steps of a layer (of any for steps outside the layers)."""
        for step in steps:
            self._handlers[type(step)](step, layer)

    def settle(self) -> None:
        """Before a pause: nothing stays under way. Weights are gathered and used within a layer."""
        if self._moving is not None:
            self._finish_history(FinishHistory(), 0)

    @property
    def moved_layers(self) -> int:
        """Layers whose KV of earlier chunks has been moved."""
        return self._moved

    def _layer(self, layer: int) -> LayerWeights:
        return self._decoder.weights.layers[layer]

    def _exchange(self, step: ExchangeRows, layer: int) -> None:
        source = self.registers.take(step.source)
        self.registers[step.target] = start_exchange(self._transport, step, source, MessageStream.ROWS)()

    def _embed(self, step: EmbedTokens, layer: int) -> None:
        decoder = self._decoder
        assert decoder.weights.embedding is not None, "this rank holds no embedding"
        local = self._tokens[torch.from_numpy(step.positions - self._first)] - decoder.vocabulary.start
        # Ids of other ranks' vocabulary slices give zeros: the scatter step sums the ranks' rows.
        foreign = (local < 0) | (local >= len(decoder.vocabulary))
        rows = functional.embedding(local.masked_fill(foreign, 0), decoder.weights.embedding)
        self.registers[step.target] = rows.masked_fill_(foreign.unsqueeze(1), 0.0)

    def _norm(self, step: NormRows, layer: int) -> None:
        weight = self._decoder.weights.final_norm
        if step.which != "final":
            held = self._layer(layer)
            weight = held.attention_norm if step.which == "attention" else held.mlp_norm
        assert weight is not None, "this rank holds no final norm"
        self.registers[step.target] = norm(self.registers.take(step.source), weight, self._config)

    def _table(self, step: ProjectHeads | WholeLayer) -> RotaryTable:
        """Return the rotation of a step's rows, computed at the first layer and reused by all others."""
        if id(step) not in self._rotary:
            self._rotary[id(step)] = self._decoder.rotary_table(torch.from_numpy(step.positions))
        return self._rotary[id(step)]

    def _heads(self, step: ProjectHeads, layer: int) -> None:
        held, kv_heads = self._layer(layer), self._decoder.config.kv_heads
        stacked = heads(self.registers.take(step.source), held.qkv, held, kv_heads, self._table(step), self._config)
        self.registers[step.target] = stacked.flatten(1)

    def _layer_of(self, step: WholeLayer, layer: int) -> None:
        hidden, config = self.registers[ROWS], self._config
        if hidden.shape[0]:
            mixing = _StepBackend(self, step)
            self._decoder.run_layer(layer, hidden, self._table(step), mixing, mixing)
            return
        # A rank without rows still takes part in the ring: keys of other members pass through it.
        self.registers[step.source] = hidden.new_empty(0, (config.q_heads + 2 * config.kv_heads) * config.head_dim)
        self.run(step.steps, layer)
        self.registers.take(step.target)

    def _attend(self, step: RingAttend, layer: int) -> None:
        queries, block = self._stored(step, layer)
        mixed = attend_by_ring(self._transport, step, queries, block, self.look)
        self.registers[step.target] = mixed.transpose(0, 1).flatten(1)

    def _attend_in_place(self, step: AttendInPlace, layer: int) -> None:
        queries, block = self._stored(step, layer)
        mixed = attend_in_place(self._transport, step, queries, block)
        self.registers[step.target] = mixed.transpose(0, 1).flatten(1)

    def _stored(self, step: RingAttend | AttendInPlace, layer: int) -> tuple[Tensor, Tensor]:
        """Store the chunk's keys and values. Returns its queries (heads, rows, d) and all KV held here."""
        stacked = self.registers.take(step.source)
        stacked = stacked.view(stacked.shape[0], stacked.shape[1] // self._config.head_dim, self._config.head_dim)
        # The last 2 * kv_heads are keys and values, whether the queries are all heads or a slice.
        queries = stacked.shape[1] - 2 * self._kv_heads
        self._shard.store(layer, step.past, stacked[:, queries : -self._kv_heads], stacked[:, -self._kv_heads :])
        return stacked[:, :queries].transpose(0, 1), self._shard.block(layer, step.past + stacked.shape[0])

    def _out(self, step: ProjectOutput, layer: int) -> None:
        self.registers[step.target] = self._layer(layer).out(self.registers.take(step.source))

    def _feed(self, step: FeedForward, layer: int) -> None:
        held = self._layer(layer)
        gate_up = self._matrix("gate_up", held.gate_up, step.whole)
        down = self._matrix("down", held.down, step.whole)
        self.registers[step.target] = feed(self.registers.take(step.source), gate_up, down)

    def _add(self, step: AddRows, layer: int) -> None:
        self.registers[ROWS].add_(self.registers.take(step.source))

    def _head(self, step: ComputeLogits, layer: int) -> None:
        head = self._decoder.weights.head
        assert head is not None, "this rank holds no head"
        self.registers[step.target] = head(self.registers.take(step.source)).float()

    def _start_weights(self, step: StartWeights, layer: int) -> None:
        held = self._layer(layer)
        for part in step.parts:
            _, name, kind = part.source.split(".")
            linear: PackedLinear = getattr(held, name)
            source = linear.dense() if kind == "weight" else linear.bias
            if source is None:  # the bias of a sum is held by the first rank alone
                source = held.attention_norm.new_empty(0, 1)
            matrix = source if source.dim() == 2 else source.unsqueeze(1)
            self._fetching[part.target] = start_exchange(self._transport, part, matrix, MessageStream.WEIGHTS)

    def _finish_weights(self, step: FinishWeights, layer: int) -> None:
        self._whole = {target: finish() for target, finish in self._fetching.items()}
        self._fetching.clear()

    def _start_history(self, step: StartHistory, layer: int) -> None:
        layer += step.ahead
        # Layers move in order, each once: after a resume, a layer that was moved before the pause is skipped.
        if self._moved == layer < self._config.layers:
            self._moving = self._history.start(layer)

    def _finish_history(self, step: FinishHistory, layer: int) -> None:
        if self._moving is not None:
            self._moving()
            self._moving = None
            self._moved += 1

    def _matrix(self, name: str, own: PackedLinear, whole: bool) -> Matrix:
        if not whole:
            return own
        # Popped: gathered weights are freed after their one use in this layer.
        weight, bias = self._whole.pop(f"whole.{name}.weight"), self._whole.pop(f"whole.{name}.bias", None)
        return partial(functional.linear, weight=weight, bias=None if bias is None else bias.view(-1))


class _StepBackend(AttentionBackend):
    """The steps of a layer as a backend, and as its plan: what a decoder calls in the place of attention."""

    def __init__(self, executor: StepExecutor, step: WholeLayer) -> None:
        self._executor, self._step = executor, step

    @property
    def rows(self) -> int:
        return len(self._step.positions)

    def plan(self, segments: Sequence[BatchSegment], pool: KvPool) -> AttentionPlan:
        """Return this object: the steps are the plan."""
        return self

    @override
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        executor, step = self._executor, self._step
        executor.registers[step.source] = _side_by_side(q, k, v)
        executor.run(step.steps, layer)
        return executor.registers.take(step.target).view(q.shape)


def _side_by_side(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return heads (rows, n, d) as one matrix (rows, all heads · d): a view where they are slices of one tensor."""
    rows, size, heads = q.shape[0], q.element_size(), q.shape[1] + k.shape[1] + v.shape[1]
    width = heads * q.shape[2]
    if (
        q.stride() == k.stride() == v.stride() == (width, q.shape[2], 1)
        and k.data_ptr() == q.data_ptr() + q.shape[1] * q.shape[2] * size
        and v.data_ptr() == k.data_ptr() + k.shape[1] * k.shape[2] * size
    ):
        return q.as_strided((rows, width), (width, 1))
    return torch.cat([q, k, v], 1).flatten(1)


class PausedState(NamedTuple):
    """Bytes of a paused chunk on one rank."""

    kv_bytes: int
    """Keys and values of earlier chunks, and of this chunk's finished layers."""
    activation_bytes: int
    """The rows between two layers: all state beside KV, "usually less than 5%" of that in the paper."""
    kv_bytes_at_end: int
    """Keys and values once the chunk is finished."""


Storage = Callable[[int, int], KvShard]
"""(KV heads, tokens) to a shard with room for them, in slots of a worker's own pool."""


class SequencePrefill:
    """One prompt's prefill on one rank of a group, made once for a prompt on every rank, and again after a loss.

    config: the whole model's. storage: returns where KV is kept; called at most once for a chunk, when the heads differ
    from the chunk before or the room is too small. It may return the place that it returned before, extended. By
    default, pools of this prompt alone.
    """

    def __init__(
        self, decoder: DecoderModel, config: DecoderConfig, transport: TensorTransport, storage: Storage | None = None
    ) -> None:
        self._decoder, self._config, self._transport = decoder, config, transport
        self._storage = storage or self._own_pool
        self.held: KvLayout = EMPTY
        """Layout of the KV of finished chunks."""
        self.shard: KvShard | None = None
        """Storage of this rank's KV. The shard that it replaced is free once a chunk is finished."""
        self._chunk: ChunkPlan | None = None
        self.layer = 0
        """The layer at which `run` continues."""
        self.asked = False
        """Whether a pause was requested in the last completed layer; after a chunk's last layer it is still pending."""

    @property
    def after(self) -> KvLayout | None:
        """Layout of KV after the current chunk; its finished layers have it already. None: there is no such chunk."""
        return None if self._chunk is None else self._chunk.after

    def travel(self, transport: TensorTransport) -> None:
        """Replace the connections for the following chunks. Called between chunks; the rank is unchanged."""
        if self._chunk is not None or transport.rank != self._transport.rank:
            raise InvariantError("a chunk under way goes on over the connections that it began with")
        self._transport = transport

    def attach(self, held: KvLayout, shard: KvShard | None) -> None:
        """Start from existing KV, such as a cached prefix. Called before the first chunk. shard: this rank's part."""
        if self._chunk is not None or self.held:
            raise InvariantError("KV is adopted after the first chunk began")
        self.held, self.shard = held, shard

    @torch.inference_mode()
    def begin(
        self,
        spec: ChunkSpec,
        tokens: Sequence[int] | Tensor,
        wanted: Sequence[int] | None = None,
        held: KvLayout | None = None,
    ) -> None:
        """Take up a chunk. tokens: the chunk's, `spec.tokens` of them. wanted: positions whose logits `finish` gives
        (None: the last; maybe none). held: the layout so far, for a rank that joins; other ranks know it.

        Raises ConfigError for a group or strategy that does not fit the model, the ranks or the KV that is there, and
        InvariantError while another chunk is under way.
        """
        if self._chunk is not None:
            raise InvariantError("a chunk begins before the one before it is finished")
        if len(tokens) != spec.tokens:
            raise ConfigError(f"tokens: {len(tokens)} given for chunk [{spec.start}, {spec.end})")
        rank = self._transport.rank
        if rank not in spec.group.ranks:
            raise ConfigError(f"group.ranks {spec.group.ranks}: rank {rank} is not one of them")
        shard = self._decoder.shard
        if (shard.rank, shard.ranks) != (spec.group.ranks.index(rank) % spec.group.tp, spec.group.tp):
            raise ConfigError(f"group.tp {spec.group.tp}: rank {rank} holds slice {shard.rank} of {shard.ranks}")
        chunk = ChunkPlan(spec, self.held if held is None else held, self._config, wanted)
        self._plan: RankPlan = chunk.rank(rank)
        source = self.shard
        own = chunk.after[rank]
        # A place can be reused if it has the same heads and enough slots; KV then moves within it.
        if source is None or source.pool.kv_heads != len(own.heads) or source.capacity < len(own.positions):
            self.shard = self._storage(len(own.heads), len(own.positions))
        assert self.shard is not None
        before = chunk.before.get(rank)
        history = KvMoves(
            self._transport,
            chunk.moves(),
            None if source is None or before is None else (source, before.heads),
            (self.shard, own.heads),
        )
        self._executor = StepExecutor(
            self._decoder, self._config, self._transport, self.shard, history, torch.as_tensor(tokens), spec.start
        )
        self._before, self._source, self._chunk, self.layer = before, source, chunk, 0
        self._entered = self.asked = False

    @torch.inference_mode()
    def run(
        self,
        until: int | None = None,
        pause: Callable[[], bool] | None = None,
        behind: Callable[[int], None] | None = None,
        look: Callable[[], None] | None = None,
    ) -> bool:
        """Continue the chunk. Returns True when all layers are done, False when it was paused before one.

        until: the layer to stop before, the same on all ranks. pause: in a chunk that is `preemptible`, asked on the
        group's first rank before each layer; when it says yes, every rank stops behind that layer. Its answer travels
        while the layer is computed (a rank that is alone is asked behind it). behind: called behind each layer with the
        number of layers whose KV is all in place. look: called within a layer, every so often; what it raises ends the
        chunk.
        """
        layers = self._config.layers
        self._under_way()
        executor, plan = self._executor, self._plan
        if look is not None:
            executor.look = look
        if not self._entered:
            executor.run(plan.enter, 0)
            self._entered = True
        stop = layers if until is None else min(until, layers)
        if self.layer < stop:
            executor.run(plan.fetch, self.layer)
        while self.layer < stop:
            # Asked before the layer, so that the answer travels while the layer is computed.
            asked = self._ask(pause) if self._under_way().spec.preemptible else None
            executor.run(plan.layer, self.layer)
            self.layer += 1
            if behind is not None:
                behind(self.layer)
            self.asked = asked is not None and asked()
            if self.asked and self.layer < layers:
                break
        # No transfer may be left under way at a pause: other chunks may use the connections next.
        executor.settle()
        return self.layer == layers

    @torch.inference_mode()
    def finish(self) -> Tensor | None:
        """After the last layer: the logits of the wanted positions, (wanted, vocab) fp32, on the group's first rank,
        where there are any."""
        chunk = self._under_way()
        if self.layer < self._config.layers or not self._entered:
            raise InvariantError(f"a chunk is finished at layer {self.layer} of {self._config.layers}")
        self._executor.run(self._plan.leave, self.layer)
        logits = self._executor.registers.pop(LOGITS) if self._plan.answers else None
        self.held, self._chunk = chunk.after, None
        self._executor.registers.clear()
        del self._executor, self._source
        return logits

    @property
    def saved(self) -> PausedState:
        """Memory that this rank holds for the paused chunk and for the chunks before it."""
        chunk, rank = self._under_way(), self._transport.rank
        layers, done, moved = self._config.layers, self.layer, self._executor.moved_layers
        after = len(chunk.after[rank].positions)
        history = len(chunk.history[rank].positions)
        before = 0 if self._before is None else len(self._before.positions)
        assert self.shard is not None
        own = self.shard.token_bytes
        old = own if self._source is None else self._source.token_bytes
        rows = self._executor.registers.get(ROWS)
        return PausedState(
            # Finished layers hold history and chunk, moved layers history at its new place, the rest history at its old
            # place.
            kv_bytes=own * (done * after + (moved - done) * history) + old * (layers - moved) * before,
            kv_bytes_at_end=own * layers * after,
            activation_bytes=0 if rows is None else rows.numel() * rows.element_size(),
        )

    def _own_pool(self, kv_heads: int, tokens: int) -> KvShard:
        """Allocate a pool for the longest prompt: its memory becomes resident only when it is written."""
        decoder, config = self._decoder, self._config
        slots = max(tokens, config.max_model_len)
        pool = KvPool(config.layers, kv_heads, slots, config.head_dim, decoder.dtype, decoder.device)
        return KvShard(pool, [(0, slots)])

    def _ask(self, pause: Callable[[], bool] | None) -> Callable[[], bool]:
        """Begin to send the first rank's pause decision to all; the returned function waits for it.

        A rank that is alone decides when that function is called, behind the layer.
        """
        first, *others = self._under_way().spec.group.ranks
        if not others:
            return lambda: pause is not None and pause()
        if self._transport.rank == first:
            flag = torch.tensor([1 if pause is not None and pause() else 0], dtype=torch.int32)
            wait = self._transport.exchange([(rank, flag) for rank in others], [], MessageStream.PAUSE)
        else:
            flag = torch.zeros(1, dtype=torch.int32)
            wait = self._transport.exchange([], [(first, flag)], MessageStream.PAUSE)

        def answer() -> bool:
            wait()
            return bool(flag)

        return answer

    def _under_way(self) -> ChunkPlan:
        if self._chunk is None:
            raise InvariantError("no chunk is under way")
        return self._chunk
