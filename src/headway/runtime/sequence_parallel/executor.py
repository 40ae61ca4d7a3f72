"""Interpreter of the steps of one chunk on one rank. Independent of the strategy, which determines the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from headway.runtime.attention.base import AttentionPlan, BatchSegment
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.decoder import DecoderModel
from headway.runtime.model.layer import Matrix, feed, heads, norm
from headway.runtime.model.linear import PackedLinear
from headway.runtime.model.rope import RotaryTable
from headway.runtime.model.weights import LayerWeights
from headway.runtime.sequence_parallel.distributed_attention import attend_by_ring, attend_in_place
from headway.runtime.sequence_parallel.kv_shard import KvMoves, KvShard
from headway.runtime.sequence_parallel.register_exchange import MatrixRegisters, start_exchange
from headway.runtime.sequence_parallel.steps import (
    ROWS,
    AddRows,
    AttendInPlace,
    ComputeLogits,
    EmbedTokens,
    ExchangeRows,
    FeedForward,
    FinishHistory,
    FinishWeights,
    NormRows,
    ProjectHeads,
    ProjectOutput,
    RingAttend,
    StartHistory,
    StartWeights,
    Step,
    WholeLayer,
)
from headway.runtime.sequence_parallel.transport import MessageStream, TensorTransport


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
        self._fetching: deque[list[tuple[str, Callable[[], Tensor]]]] = deque()
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
        """Before a pause: nothing stays under way, and no weights but this rank's own are kept."""
        if self._moving is not None:
            self._finish_history(FinishHistory(), 0)
        while self._fetching:
            self._finish_weights(FinishWeights(), 0)
        self._whole.clear()

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
        held, kv_heads = self._layer(layer), (self._config if step.whole else self._decoder.config).kv_heads
        qkv = self._matrix("qkv", held.qkv, step.whole)
        stacked = heads(self.registers.take(step.source), qkv, held, kv_heads, self._table(step), self._config)
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
        matrix = self._matrix("out", self._layer(layer).out, step.whole)
        self.registers[step.target] = matrix(self.registers.take(step.source))

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
        # `ahead` is a bool: 1 prefetches the next layer; there is nothing to fetch behind the last.
        layer += step.ahead
        if layer == self._config.layers:
            return
        held = self._layer(layer)
        begun = []
        for part in step.parts:
            _, name, kind = part.source.split(".")
            linear: PackedLinear = getattr(held, name)
            source = linear.dense() if kind == "weight" else linear.bias
            if source is None:  # the bias of a sum is held by the first rank alone
                source = held.attention_norm.new_empty(0, 1)
            matrix = source if source.dim() == 2 else source.unsqueeze(1)
            begun.append((part.target, start_exchange(self._transport, part, matrix, MessageStream.WEIGHTS)))
        self._fetching.append(begun)

    def _finish_weights(self, step: FinishWeights, layer: int) -> None:
        for target, finish in self._fetching.popleft():
            self._whole[target] = finish()

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


class _StepBackend:
    """The steps of a layer as a backend, and as its plan: what a decoder calls in the place of attention."""

    def __init__(self, executor: StepExecutor, step: WholeLayer) -> None:
        self._executor, self._step = executor, step

    @property
    def rows(self) -> int:
        return len(self._step.positions)

    def plan(self, segments: Sequence[BatchSegment], pool: KvPool) -> AttentionPlan:
        """Return this object: the steps are the plan."""
        return self

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """See `AttentionBackend.run`."""
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
