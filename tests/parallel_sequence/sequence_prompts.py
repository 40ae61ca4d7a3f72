"""A prompt, how one process answers it, and how groups of ranks do. Shared by virtual ranks and real processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tests.parallel_sequence.sequence_routes import gathered
from tests.parallel_sequence.virtual_sequence_ranks import on_ranks
from torch import Tensor

from headway.core.request import Strategy
from headway.runtime.attention.backend import BatchSegment
from headway.runtime.model.config import DecoderConfig, ModelShard
from headway.runtime.model.decoder import DecoderModel
from headway.runtime.model.loading import load_decoder
from headway.runtime.sequence_parallel.attention import KvMoves, KvShard, TensorTransport
from headway.runtime.sequence_parallel.layout import EMPTY, ChunkSpec, KvLayout, Order, SpGroup, moves
from headway.runtime.sequence_parallel.prefill import SequencePrefill
from headway.runtime.sequence_parallel.schedule import ChunkPlan

DECODES = 6
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 3, "head_dim": 8}


@dataclass(frozen=True)
class Part:
    """A chunk of `tokens` on the first `ranks` ranks. keepers: the first so many of them keep KV; 0: all."""

    tokens: int
    ranks: int
    attn: str = "ring"
    mlp: str = "local"
    order: Order = "zigzag"
    node: int | None = None
    preemptible: bool = False
    in_place: bool = False
    keepers: int = 0


def route(parts: Sequence[Part], tp: int = 1) -> list[ChunkSpec]:
    specs, at = [], 0
    for part in parts:
        group = SpGroup(tuple(range(part.ranks)), tp, part.node)
        strategy = Strategy(attn=part.attn, mlp=part.mlp)
        keepers = tuple(range(part.keepers))
        specs.append(
            ChunkSpec(at, at + part.tokens, group, strategy, part.order, part.preemptible, part.in_place, keepers)
        )
        at += part.tokens
    return specs


class Model:
    """A checkpoint, whole and in slices, and the answers of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._slices: dict[ModelShard, DecoderModel] = {}
        self.whole = self.slice(ModelShard())
        self.config: DecoderConfig = self.whole.config

    def slice(self, shard: ModelShard) -> DecoderModel:
        if shard not in self._slices:
            self._slices[shard] = load_decoder(self.folder, "float32", shard=shard)
        return self._slices[shard]

    def answer(self, prompt: Tensor) -> tuple[Tensor, list[int]]:
        """Logits of every token, and the tokens that greedy decoding adds."""
        tokens = len(prompt)
        pool = self.whole.make_pool(tokens + DECODES)
        runs = ((0, tokens + DECODES),)
        plan = self.whole.backend.plan([BatchSegment(0, tokens, 0, runs)], pool)
        logits = self.whole.forward(prompt, torch.arange(tokens), plan, None)
        return logits, self.decode(KvShard(pool, runs), tokens, int(logits[-1].argmax()))

    def decode(self, shard: KvShard, past: int, token: int) -> list[int]:
        """Greedy tokens from the one given on."""
        drawn = [token]
        for at in range(past, past + DECODES - 1):
            plan = self.whole.backend.plan([BatchSegment(0, 1, at, shard.slot_ranges)], shard.pool)
            logits = self.whole.forward(torch.tensor([drawn[-1]]), torch.tensor([at]), plan, None)
            drawn.append(int(logits[-1].argmax()))
        return drawn


def prompt_of(tokens: int, vocabulary: int = 128, seed: int = 0) -> Tensor:
    return torch.randint(3, vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))


def layouts(specs: Sequence[ChunkSpec], config: DecoderConfig) -> list[KvLayout]:
    """The layout before each chunk, and after the last."""
    found: list[KvLayout] = [EMPTY]
    for spec in specs:
        found.append(ChunkPlan(spec, found[-1], config).after)
    return found


@torch.inference_mode()
def gather(model: Model, transport: TensorTransport, held: KvLayout, source: KvShard | None, end: int) -> KvShard:
    """Copy all KV to rank 0: to slots that do not follow each other, as a pool in use has them."""
    rank, to = transport.rank, gathered([0], end, model.config)
    target = KvShard(model.whole.make_pool(2 * (end + DECODES) + 8), ((end + DECODES + 4, 3), (1, end + DECODES)))
    todo = KvMoves(
        transport,
        moves(held, to),
        None if source is None else (source, held[rank].heads),
        None if rank else (target, to[0].heads),
    )
    for layer in range(model.config.layers):
        todo.start(layer)()
    return target


def wanted_of(spec: ChunkSpec) -> list[int]:
    """Some positions whose logits are compared: the edges of a chunk and what lies between."""
    return sorted({spec.start, (spec.start + spec.end) // 2, spec.end - 1})


@dataclass
class Said:
    """What a rank has to say: logits by chunk, and on the rank that decodes the tokens."""

    logits: list[Tensor]
    tokens: list[int] | None = None


def take_part(
    model: Model,
    transport: TensorTransport,
    specs: Sequence[ChunkSpec],
    prompt: Tensor,
    runner: Callable[[SequencePrefill], None] = lambda prefill: None,
) -> Said:
    """What each rank does: its chunks, then its KV to rank 0, which goes on alone, whatever its TP degree was.

    `runner` may carry out layers before the rest is.
    """
    rank, config, tp = transport.rank, model.config, specs[0].group.tp
    before = layouts(specs, config)
    prefill = SequencePrefill(model.slice(ModelShard(rank % tp, tp)), config, transport)
    said = Said([])
    for spec, held in zip(specs, before[:-1], strict=True):
        if rank in spec.group.ranks:
            prefill.begin(spec, prompt[spec.start : spec.end], wanted_of(spec), held)
            runner(prefill)
            assert prefill.run()
            logits = prefill.finish()
            assert (logits is not None) == (rank == 0)
            if logits is not None:
                said.logits.append(logits)
    end = specs[-1].end
    if rank and prefill.shard is None:
        return said
    shard = gather(model, transport, before[-1], prefill.shard, end)
    if not rank:
        said.tokens = model.decode(shard, end, int(said.logits[-1][-1].argmax()))
    return said


def compare(model: Model, specs: Sequence[ChunkSpec], prompt: Tensor, said: Said) -> float:
    """The largest error of a logit over the largest |logit|. Raises where tokens differ."""
    logits, tokens = model.answer(prompt)
    worst = 0.0
    for spec, got in zip(specs, said.logits, strict=True):
        wanted = logits[wanted_of(spec)]
        assert got.shape == wanted.shape
        assert torch.equal(got.argmax(1), wanted.argmax(1))
        worst = max(worst, float((got - wanted).abs().max() / logits.abs().max()))
    assert said.tokens == tokens
    return worst


TOLERANCE = 1e-4


def check_parts(model: Model, parts: list[Part], tp: int = 1) -> None:
    specs = route(parts, tp)
    prompt = prompt_of(specs[-1].end)
    ranks = range(max(part.ranks for part in parts))
    said = on_ranks(ranks, lambda transport: take_part(model, transport, specs, prompt))
    assert compare(model, specs, prompt, said[0]) < TOLERANCE
