"""One rank's part in the prefill of one prompt, chunk by chunk, on groups that grow. Called by an instance's worker.

For each chunk call `begin`, then `run` until it returns True, then `finish`; all ranks of the chunk's group make the
same calls with the same arguments. At the end `hand_over` moves the KV to the instance that decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway.core.errors import ConfigError, InvariantError
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.decoder import DecoderModel
from headway.runtime.sequence_parallel.chunk import LOGITS, ChunkPlan, RankPlan
from headway.runtime.sequence_parallel.executor import StepExecutor
from headway.runtime.sequence_parallel.group import ChunkSpec
from headway.runtime.sequence_parallel.kv_shard import KvMoves, KvShard
from headway.runtime.sequence_parallel.layout import EMPTY, KvLayout, moves
from headway.runtime.sequence_parallel.paused_state import PausedState
from headway.runtime.sequence_parallel.steps import ROWS
from headway.runtime.sequence_parallel.transport import MessageStream, TensorTransport

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
        self._held: KvLayout = EMPTY
        self._shard: KvShard | None = None
        self._chunk: ChunkPlan | None = None
        self._layer = 0
        self._asked = False

    @property
    def held(self) -> KvLayout:
        """Layout of the KV of finished chunks."""
        return self._held

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
        if self._chunk is not None or self._held:
            raise InvariantError("KV is adopted after the first chunk began")
        self._held, self._shard = held, shard

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
        chunk = ChunkPlan(spec, self._held if held is None else held, self._config, wanted)
        self._plan: RankPlan = chunk.rank(rank)
        source = self._shard
        own = chunk.after[rank]
        # A place can be reused if it has the same heads and enough slots; KV then moves within it.
        if source is None or source.pool.kv_heads != len(own.heads) or source.capacity < len(own.positions):
            self._shard = self._storage(len(own.heads), len(own.positions))
        assert self._shard is not None
        before = chunk.before.get(rank)
        history = KvMoves(
            self._transport,
            chunk.moves(),
            None if source is None or before is None else (source, before.heads),
            (self._shard, own.heads),
        )
        self._executor = StepExecutor(
            self._decoder, self._config, self._transport, self._shard, history, torch.as_tensor(tokens), spec.start
        )
        self._before, self._source, self._chunk, self._layer = before, source, chunk, 0
        self._entered = self._asked = False

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
        if self._layer < stop:
            executor.run(plan.fetch, self._layer)
        while self._layer < stop:
            # Asked before the layer, so that the answer travels while the layer is computed.
            asked = self._ask(pause) if self.preemptible else None
            executor.run(plan.layer, self._layer)
            self._layer += 1
            if behind is not None:
                behind(self._layer)
            self._asked = asked is not None and asked()
            if self._asked and self._layer < layers:
                break
        # No transfer may be left under way at a pause: other chunks may use the connections next.
        executor.settle()
        return self._layer == layers

    @torch.inference_mode()
    def finish(self) -> Tensor | None:
        """After the last layer: the logits of the wanted positions, (wanted, vocab) fp32, on the group's first rank,
        where there are any."""
        chunk = self._under_way()
        if self._layer < self._config.layers or not self._entered:
            raise InvariantError(f"a chunk is finished at layer {self._layer} of {self._config.layers}")
        self._executor.run(self._plan.leave, self._layer)
        logits = self._executor.registers.pop(LOGITS) if self._plan.answers else None
        self._held, self._chunk = chunk.after, None
        self._executor.registers.clear()
        del self._executor, self._source
        return logits

    @property
    def shard(self) -> KvShard | None:
        """Storage of this rank's KV. The shard that it replaced is free once a chunk is finished."""
        return self._shard

    @property
    def preemptible(self) -> bool:
        """Whether the chunk under way may be paused by its first rank."""
        return self._under_way().spec.preemptible

    @property
    def asked(self) -> bool:
        """Whether a pause was requested in the last completed layer; after a chunk's last layer it is still pending."""
        return self._asked

    @property
    def layer(self) -> int:
        """The layer at which `run` continues."""
        return self._layer

    @property
    def saved(self) -> PausedState:
        """Memory that this rank holds for the paused chunk and for the chunks before it."""
        chunk, rank = self._under_way(), self._transport.rank
        layers, done, moved = self._config.layers, self._layer, self._executor.moved_layers
        after = len(chunk.after[rank].positions)
        history = len(chunk.history[rank].positions)
        before = 0 if self._before is None else len(self._before.positions)
        assert self._shard is not None
        own = self._shard.token_bytes
        old = own if self._source is None else self._source.token_bytes
        rows = self._executor.registers.get(ROWS)
        return PausedState(
            # Finished layers hold history and chunk, moved layers history at its new place, the rest history at its old
            # place.
            kv_bytes=own * (done * after + (moved - done) * history) + old * (layers - moved) * before,
            kv_bytes_at_end=own * layers * after,
            activation_bytes=0 if rows is None else rows.numel() * rows.element_size(),
        )

    def hand_over(self, to: KvLayout, target: KvShard | None) -> None:
        """Move all KV to the layout `to` (`layout.gathered`: in token order on one instance), layer by layer.

        Called by every rank that holds some and every rank that gets some; the latter give the place, of
        `to[rank].heads` KV heads. Ranks that were in no chunk call the function `hand_over` with the layout instead.
        """
        if self._chunk is not None:
            raise InvariantError("KV is handed over before its chunk is finished")
        hand_over(self._transport, self._held, to, self._shard, target, self._config.layers)

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


@torch.inference_mode()
def hand_over(
    transport: TensorTransport,
    held: KvLayout,
    to: KvLayout,
    source: KvShard | None,
    target: KvShard | None,
    layers: int,
) -> None:
    """See `SequencePrefill.hand_over`. One layer is under way while the one before it is written."""
    rank = transport.rank
    if rank in to and (target is None or target.pool.kv_heads != len(to[rank].heads)):
        raise ConfigError(f"target: rank {rank} needs a place with {len(to[rank].heads)} KV heads")
    if target is not None and rank in to and target.capacity < len(to[rank].positions):
        raise ConfigError(f"target: {target.capacity} slots for {len(to[rank].positions)} tokens")
    todo = KvMoves(
        transport,
        moves(held, to),
        None if source is None or rank not in held else (source, held[rank].heads),
        None if target is None or rank not in to else (target, to[rank].heads),
    )
    finish: Callable[[], None] | None = None
    for layer in range(layers):
        # Two layers overlap: the next one travels while the previous one is written.
        behind = todo.start(layer)
        if finish is not None:
            finish()
        finish = behind
    if finish is not None:
        finish()
