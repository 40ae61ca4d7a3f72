"""A run that is computed piece by piece: cut alike by all, laid out so that nothing moves between, same answers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.checkpoints import make_tiny
from tests.helpers.marks import quick_diagonal
from tests.parallel_sequence.sequence_prompts import SHAPE, Model, Part, compare, layouts, prompt_of, route, take_part
from tests.parallel_sequence.sequence_routes import SMALL_CONFIG, routes
from tests.parallel_sequence.virtual_sequence_ranks import VirtualTransport, on_ranks

from headway.core.request import cut
from headway.runtime.model.config import ModelShard
from headway.runtime.sequence_parallel.layout import EMPTY, ChunkSpec, KvLayout, layout_after, moves, pieces
from headway.runtime.sequence_parallel.prefill import SequencePrefill
from headway.runtime.sequence_parallel.schedule import ChunkPlan


@given(st.integers(0, 50), st.integers(1, 400), st.integers(1, 9), st.integers(0, 60))
def test_a_cut_covers_all_with_few_rows_each(start: int, tokens: int, members: int, rows: int) -> None:
    edges = cut(start, start + tokens, members, rows)
    assert edges[0][0] == start
    assert edges[-1][1] == start + tokens
    assert all(a[1] == b[0] for a, b in pairwise(edges))
    if not rows:
        assert len(edges) == 1
        return
    most = max(2, rows) * members
    assert all(0 < end - at <= most for at, end in edges)
    assert all((end - at) % (2 * members) == 0 for at, end in edges[:-1])
    assert len({end - at for at, end in edges[:-1]}) <= 1
    whole = max(2 * members, rows * members // (2 * members) * 2 * members)
    assert len(edges) <= -(-tokens // whole), "no more pieces than are needed"


@settings(max_examples=150)
@given(routes(), st.integers(1, 4))
def test_nothing_moves_between_the_pieces_of_a_run(specs: list[ChunkSpec], rows: int) -> None:
    held: KvLayout = EMPTY
    for spec in specs:
        chunks = pieces(spec, rows)
        after = layout_after(chunks, held, SMALL_CONFIG)
        for number, one in enumerate(chunks):
            chunk = ChunkPlan(one, held, SMALL_CONFIG)
            if number:
                for move in moves(held, chunk.history):
                    assert move.source == move.target
                    assert np.array_equal(move.from_slots, move.to_slots)
            held = chunk.after
        assert list(held) == list(after)
        for rank, one in held.items():  # type: ignore[assignment]
            assert one.heads == after[rank].heads
            assert np.array_equal(one.positions, after[rank].positions)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_tiny("qwen2", Path(tmp_path_factory.mktemp("model")), **SHAPE))


ROUTES: dict[str, tuple[int, list[Part]]] = {
    "ring that grows": (1, [Part(41, 1), Part(60, 2), Part(77, 4)]),
    "striped that grows": (1, [Part(n, ranks, order="striped") for n, ranks in ((41, 1), (60, 2), (77, 4))]),
    "contiguous": (1, [Part(41, 3, order="contiguous"), Part(30, 3, order="contiguous")]),
    "ulysses that grows": (1, [Part(41, 1, "ulysses"), Part(60, 2, "ulysses"), Part(77, 4, "ulysses")]),
    "ulysses in nodes": (1, [Part(61, 4, "ulysses", node=2), Part(50, 4, "ulysses", node=2)]),
    "ulysses of more ranks than KV heads": (1, [Part(61, 8, "ulysses"), Part(50, 8, "ulysses")]),
    "tp2 megatron+megatron": (2, [Part(41, 2, "megatron", "megatron"), Part(60, 4, "megatron", "megatron")]),
    "tp2 megatron+ulysses": (2, [Part(41, 2, "megatron", "ulysses"), Part(60, 4, "megatron", "ulysses")]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "rows"), quick_diagonal(list(ROUTES), [1, 6]))
def test_answers_are_those_of_one_process(model: Model, name: str, rows: int) -> None:
    tp, parts = ROUTES[name]
    specs = [one for spec in route(parts, tp) for one in pieces(spec, rows)]
    prompt = prompt_of(specs[-1].end)
    ranks = range(max(part.ranks for part in parts))
    said = on_ranks(ranks, lambda transport: take_part(model, transport, specs, prompt))
    assert len(specs) > len(parts)
    assert compare(model, specs, prompt, said[0]) < 1e-4


@pytest.mark.parametrize(("tp", "attn"), [(1, "ring"), (1, "ulysses"), (2, "megatron")])
def test_a_piece_without_wanted_logits_has_none(model: Model, tp: int, attn: str) -> None:
    specs = pieces(route([Part(50, 4, attn)], tp)[0], 5)
    prompt, before = prompt_of(50), layouts(specs, model.config)

    def work(transport: VirtualTransport) -> list[torch.Tensor | None]:
        prefill = SequencePrefill(model.slice(ModelShard(transport.rank % tp, tp)), model.config, transport)
        found = []
        for spec, held in zip(specs, before[:-1], strict=True):
            wanted = None if spec is specs[-1] else ()
            prefill.begin(spec, prompt[spec.start : spec.end], wanted, held)
            prefill.run()
            found.append(prefill.finish())
        return found

    (*none, last), *others = on_ranks(range(4), work)
    assert none == [None] * (len(specs) - 1)
    assert all(found == [None] * len(specs) for found in others)
    logits = model.answer(prompt)[0]
    assert last is not None
    assert (last - logits[-1]).abs().max() < 1e-4 * logits.abs().max()
