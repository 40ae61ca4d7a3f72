"""Random routes of a prompt over instances, and the KV that a change of layout moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from tests.helpers.random_weights import reference_config

from headway.core.request import Strategy
from headway.runtime.model.config import DecoderConfig, ModelShard
from headway.runtime.sequence_parallel.layout import ORDERS, ChunkSpec, HeldShard, KvLayout, SpGroup, moves

SMALL_CONFIG = replace(reference_config(512), layers=2, hidden_size=32, q_heads=8, kv_heads=2, head_dim=4, mlp_size=24,
                 vocab_size=50)  # fmt: skip


@st.composite
def routes(draw: st.DrawFn) -> list[ChunkSpec]:
    """Chunks of a prompt on groups that grow, each with a strategy of its own."""
    specs, at, size = [], 0, 1
    tp = draw(st.sampled_from([1, 2]))
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n >= size]))
        ranks = size * tp
        attn = draw(st.sampled_from(["ring", "ulysses"] if tp == 1 and ranks in (1, 2, 4) else ["ring"]))
        node = draw(
            st.sampled_from([None] + [n for n in range(tp, ranks + 1, tp) if ranks % n == 0 and n in (1, 2, 4, 8)])
        )
        tokens = draw(st.integers(1, 20))
        group = SpGroup(tuple(range(10, 10 + ranks)), tp, node)
        order = draw(st.sampled_from(ORDERS))
        mlp = draw(st.sampled_from(["megatron", "ulysses"]))
        specs.append(ChunkSpec(at, at + tokens, group, Strategy(attn=attn, mlp=mlp), order))
        at += tokens
    return specs


def marked_slots(layout: KvLayout) -> dict[int, np.ndarray]:
    """Each rank's slots as (head, position) marks, (heads, slots)."""
    return {
        rank: np.array([[1000 * head + p for p in one.positions] for head in one.heads]).reshape(len(one.heads), -1)
        for rank, one in layout.items()
    }


def kv_after_moves(before: KvLayout, after: KvLayout) -> dict[int, np.ndarray]:
    """What the moves make of it."""
    old = marked_slots(before)
    new = {rank: np.full((len(one.heads), len(one.positions)), -1) for rank, one in after.items()}
    for move in moves(before, after):
        source, target = before[move.source].heads.start, after[move.target].heads.start
        taken = old[move.source][move.heads.start - source : move.heads.stop - source][:, move.from_slots]
        heads = slice(move.heads.start - target, move.heads.stop - target)
        assert np.all(new[move.target][heads][:, move.to_slots] == -1), "a slot is written twice"
        new[move.target][heads, move.to_slots] = taken
    return new


def gathered(ranks: Sequence[int], tokens: int, config: DecoderConfig) -> KvLayout:
    """All tokens in order on one instance, heads cut over its ranks."""
    positions = np.arange(tokens, dtype=np.int64)
    return {r: HeldShard(ModelShard(i, len(ranks)).kv_heads(config), positions) for i, r in enumerate(ranks)}
