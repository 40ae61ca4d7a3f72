"""A prefill that is paused between layers, at every one, goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.helpers.checkpoints import make_tiny
from tests.helpers.marks import quick_diagonal
from tests.parallel_sequence.sequence_prompts import SHAPE, Model, Part, compare, layouts, prompt_of, route, take_part
from tests.parallel_sequence.virtual_sequence_ranks import VirtualTransport, on_ranks

from headway.core.errors import ConfigError, InvariantError
from headway.perf.hardware import ModelShape
from headway.perf.latency.fast_sp import saved_bytes
from headway.runtime.model.config import ModelShard
from headway.runtime.sequence_parallel.prefill import PausedState, SequencePrefill

LAYERS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return Model(make_tiny("qwen2", folder, **{**SHAPE, "num_hidden_layers": LAYERS}))


ROUTES = {
    "ring that grows": (1, [Part(21, 1), Part(30, 2), Part(27, 4)]),
    "striped": (1, [Part(21, 2, order="striped"), Part(30, 4, order="striped")]),
    "ulysses that grows": (1, [Part(21, 1, "ulysses"), Part(30, 2, "ulysses"), Part(27, 4, "ulysses")]),
    "tp2 megatron+megatron": (2, [Part(21, 2, "megatron", "megatron"), Part(30, 4, "megatron", "megatron")]),
    "tp2 megatron+ulysses": (2, [Part(21, 2, "megatron", "ulysses"), Part(30, 4, "megatron", "ulysses")]),
}


@pytest.mark.parametrize(("name", "layer"), quick_diagonal(list(ROUTES), range(LAYERS + 1)))
def test_pause_at_every_layer_with_another_prompt_between(model: Model, name: str, layer: int) -> None:
    tp, parts = ROUTES[name]
    specs = route(parts, tp)
    prompt, other = prompt_of(specs[-1].end), prompt_of(specs[-1].end, seed=1)

    def work(transport: VirtualTransport) -> tuple[object, object]:
        between = []

        def runner(prefill: SequencePrefill) -> None:
            assert prefill.run(until=layer) == (layer == LAYERS)
            assert prefill.layer == layer
            if len(between) == 0 and transport.rank < specs[0].group.ranks[-1] + 1:
                between.append(short(model, transport, specs, other))

        return take_part(model, transport, specs, prompt, runner), between

    ranks = range(specs[-1].group.ranks[-1] + 1)
    (said, between), *_ = on_ranks(ranks, work)
    assert compare(model, specs, prompt, said) < 1e-4
    first = specs[0]
    alone = model.answer(other[: first.end])[0]
    assert (between[0] - alone[[first.end - 1]]).abs().max() < 1e-4 * alone.abs().max()  # type: ignore[index]


def short(model: Model, transport: VirtualTransport, specs: list, prompt: torch.Tensor) -> torch.Tensor | None:
    """Another prompt on the ranks of the first chunk, while the first prompt's first chunk is paused."""
    tp = specs[0].group.tp
    prefill = SequencePrefill(model.slice(ModelShard(transport.rank % tp, tp)), model.config, transport)
    prefill.begin(specs[0], prompt[: specs[0].end])
    prefill.run()
    return prefill.finish()


@pytest.mark.parametrize("says_yes_at", range(LAYERS))
def test_the_first_rank_pauses_all_at_one_layer(model: Model, says_yes_at: int) -> None:
    specs = route([Part(40, 4, preemptible=True)])
    prompt = prompt_of(40)

    def work(transport: VirtualTransport) -> tuple[list[int], torch.Tensor | None]:
        prefill = SequencePrefill(model.whole, model.config, transport)
        prefill.begin(specs[0], prompt)
        asked = []

        def pause() -> bool:
            asked.append(prefill.layer)
            return prefill.layer == says_yes_at

        stops = []
        while not prefill.run(pause=pause if transport.rank == 0 else None):
            stops.append(prefill.layer)
        assert asked == (list(range(LAYERS)) if transport.rank == 0 else [])
        return stops, prefill.finish()

    results = on_ranks(range(4), work)
    expected = [] if says_yes_at == LAYERS - 1 else [says_yes_at + 1]
    assert [stops for stops, _ in results] == [expected] * 4
    logits = model.answer(prompt)[0]
    assert results[0][1] is not None
    assert (results[0][1] - logits[-1]).abs().max() < 1e-4 * logits.abs().max()


def paused(model: Model, parts: list[Part], tp: int, layer: int) -> PausedState:
    """What all ranks keep of the last chunk, paused before `layer`."""
    specs = route(parts, tp)
    prompt, before = prompt_of(specs[-1].end), layouts(specs, model.config)

    def work(transport: VirtualTransport) -> PausedState:
        rank = transport.rank
        prefill = SequencePrefill(model.slice(ModelShard(rank % tp, tp)), model.config, transport)
        for spec, held in zip(specs, before[:-1], strict=True):
            if rank not in spec.group.ranks:
                continue
            prefill.begin(spec, prompt[spec.start : spec.end], held=held)
            if spec is specs[-1]:
                prefill.run(until=layer)
                return prefill.saved
            prefill.run()
            prefill.finish()
        raise AssertionError("every rank is in the last chunk")

    states = on_ranks(range(specs[-1].group.ranks[-1] + 1), work)
    return PausedState(*(sum(each) for each in zip(*states, strict=True)))


@pytest.mark.parametrize("layer", range(LAYERS + 1))
@pytest.mark.parametrize(
    ("tp", "attn", "ranks"), [(1, "ring", 1), (1, "ulysses", 1), (1, "ulysses", 2), (2, "megatron", 2)]
)
def test_what_a_paused_prefill_keeps(model: Model, layer: int, tp: int, attn: str, ranks: int) -> None:
    """Over all ranks: KV of the finished layers and one layer's rows, as the cost model has it, and nothing else."""
    config = model.config
    shape = ModelShape(
        layers=LAYERS, hidden=config.hidden_size, q_heads=config.q_heads, kv_heads=config.kv_heads,
        head_dim=config.head_dim, mlp=config.mlp_size, vocab=config.vocab_size, dtype_bytes=4,
    )  # fmt: skip
    saved = paused(model, [Part(40, 2, attn, "ulysses")], tp, layer)
    kv, rows = saved_bytes(shape, 40, layer)
    assert (saved.kv_bytes, saved.activation_bytes) == (kv, rows)
    share = saved.activation_bytes / saved.kv_bytes_at_end
    assert share == pytest.approx(config.hidden_size / (2 * config.kv_heads * config.head_dim * LAYERS))
    grown = paused(model, [Part(40, ranks, attn), Part(10, 2 * ranks, attn)], tp, layer)
    per_token = saved_bytes(shape, 1, 1)[0]
    copies = 2 if (attn, ranks) == ("ulysses", 2) else 1  # four ranks for two KV heads
    moved = min(layer + 1, LAYERS) if layer else 0  # history is a layer ahead
    tokens = copies * (layer * 50 + (moved - layer) * 40) + (LAYERS - moved) * 40
    assert grown.kv_bytes == per_token * tokens
    assert grown.activation_bytes == 10 * config.hidden_size * 4
    assert grown.kv_bytes_at_end == per_token * LAYERS * 50 * copies


def refused(work: Callable[[SequencePrefill], object], model: Model, error: type[Exception], says: str) -> None:
    def on(transport: VirtualTransport) -> None:
        with pytest.raises(error, match=says):
            work(SequencePrefill(model.whole, model.config, transport))

    on_ranks([0], on)


def test_calls_out_of_order_are_refused(model: Model) -> None:
    spec = route([Part(4, 1)])[0]
    two = route([Part(4, 2)], tp=2)[0]

    def begun(prefill: SequencePrefill) -> SequencePrefill:
        prefill.begin(spec, [3, 4, 5, 6])
        return prefill

    refused(lambda p: p.run(), model, InvariantError, "no chunk")
    refused(lambda p: begun(p).finish(), model, InvariantError, "layer 0 of 5")
    refused(lambda p: begun(p).begin(spec, [3, 4, 5, 6]), model, InvariantError, "before the one before it")
    refused(lambda p: p.begin(spec, [3]), model, ConfigError, r"tokens: 1 given for chunk \[0, 4\)")
    refused(lambda p: p.begin(two, [3, 4, 5, 6]), model, ConfigError, "group.tp 2: rank 0 holds slice 0 of 1")
