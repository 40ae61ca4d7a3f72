"""Some of the same on real processes over gloo: one world of four, all routes one after the other."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from tests.helpers.checkpoints import make_tiny
from tests.helpers.sequence_prompts import SHAPE, Model, Part, Said, compare, prompt_of, route, take_part

from headway.runtime.executor.rank import join, rendezvous
from headway.runtime.sequence_parallel.attention import GlooTransport
from headway.runtime.sequence_parallel.prefill import SequencePrefill

WORLD = 4
ROUTES: dict[str, tuple[int, list[Part]]] = {
    "two ranks, zigzag": (1, [Part(61, 2), Part(50, 2)]),
    "striped, growing": (1, [Part(41, 1), Part(50, 2, order="striped"), Part(47, 4, order="striped")]),
    "zigzag, growing": (1, [Part(41, 1), Part(50, 2), Part(47, 4)]),
    "ulysses, growing": (1, [Part(41, 1, "ulysses"), Part(50, 2, "ulysses"), Part(47, 4, "ulysses")]),
    "ulysses in two nodes": (1, [Part(41, 4, "ulysses", node=2), Part(3, 4, "ulysses", node=2)]),
    "megatron": (2, [Part(41, 2, "megatron", "megatron"), Part(30, 2, "megatron", "megatron")]),
    "tp2, growing, megatron+megatron": (2, [Part(41, 2, "megatron", "megatron"), Part(30, 4, "megatron", "megatron")]),
    "tp2, growing, megatron+ulysses": (2, [Part(41, 2, "megatron", "ulysses"), Part(30, 4, "megatron", "ulysses")]),
    "tp2, growing, ulysses+megatron": (2, [Part(41, 2, "ulysses", "megatron"), Part(30, 4, "ulysses", "megatron")]),
    "tp2, growing, ulysses+ulysses": (2, [Part(41, 2, "ulysses", "ulysses"), Part(30, 4, "ulysses", "ulysses")]),
    "fewer tokens than ranks": (1, [Part(3, 4), Part(1, 4), Part(2, 4, order="striped")]),
    "paused by the first rank": (1, [Part(41, 2, preemptible=True), Part(30, 4, preemptible=True)]),
}


def rank_main(rank: int, port: int, folder: Path, out: Path) -> None:
    """A process: every route, rank 0's answers to a file."""
    torch.set_num_threads(1)
    join(rank, WORLD, rendezvous("127.0.0.1", port, 60.0), 60.0)
    model, transport = Model(folder), GlooTransport()
    found: dict[str, Said] = {}
    for name, (tp, parts) in ROUTES.items():
        specs = route(parts, tp)

        def runner(prefill: SequencePrefill, first: bool = rank == 0) -> None:
            if prefill.preemptible:
                for layer in (1, 2):
                    assert not prefill.run(pause=(lambda: True) if first else None)
                    assert prefill.layer == layer

        found[name] = take_part(model, transport, specs, prompt_of(specs[-1].end), runner)
    if rank == 0:
        torch.save({name: (said.logits, said.tokens) for name, said in found.items()}, out)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, dict[str, Said]]:
    folder = tmp_path_factory.mktemp("world")
    make_tiny("qwen2", folder / "model", **SHAPE)
    store = rendezvous("127.0.0.1", None, 60.0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["headway.runtime.sequence_parallel.prefill"])
    out = folder / "answers.pt"
    processes = [
        context.Process(target=rank_main, args=(rank, store.port, folder / "model", out), daemon=True)
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * WORLD
    return Model(folder / "model"), {name: Said(*told) for name, told in torch.load(out, weights_only=True).items()}


@pytest.mark.parametrize("name", ROUTES)
def test_processes_emit_the_same_tokens(answers: tuple[Model, dict[str, Said]], name: str) -> None:
    model, found = answers
    tp, parts = ROUTES[name]
    specs = route(parts, tp)
    assert compare(model, specs, prompt_of(specs[-1].end), found[name]) < 1e-4
