"""Every strategy, placement and growing group gives one process's answers (fp32), on virtual ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.checkpoints import make_tiny
from tests.helpers.marks import pairwise, quick_diagonal, quick_first
from tests.parallel_sequence.sequence_prompts import SHAPE, Model, Part, check_parts

from headway.core.errors import ConfigError
from headway.runtime.sequence_parallel.layout import ORDERS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Plain; with biases on heads; with biases everywhere; with head norms."""
    folder = tmp_path_factory.mktemp("models")
    found = {name: Model(make_tiny(name, Path(folder / name), **SHAPE)) for name in ("llama", "qwen2", "qwen3")}
    biased = make_tiny("llama", Path(folder / "biased"), **SHAPE, attention_bias=True, mlp_bias=True)
    return {**found, "biased": Model(biased)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("attn", ["ring", "ulysses"])
def test_every_model_family_equals_one_process(models: dict[str, Model], family: str, attn: str) -> None:
    check_parts(models[family], [Part(23, 4, attn), Part(31, 4, attn)])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", quick_first([3, 4, 7, 1, 2], 2))
def test_rings_with_history_equal_one_process(models: dict[str, Model], order: str, ranks: int) -> None:
    check_parts(
        models["llama"], [Part(29, ranks, order=order), Part(50, ranks, order=order), Part(17, ranks, order=order)]
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ulysses_with_history_and_more_ranks_than_kv_heads(models: dict[str, Model], ranks: int) -> None:
    check_parts(models["llama"], [Part(29, ranks, "ulysses"), Part(50, ranks, "ulysses"), Part(17, ranks, "ulysses")])


@pytest.mark.parametrize(("ranks", "node"), [(4, 2), (6, 2), (8, 4), (8, 2)])
@pytest.mark.parametrize("order", ["zigzag", "striped"])
def test_ulysses_in_nodes_and_a_ring_between_them(models: dict[str, Model], ranks: int, node: int, order: str) -> None:
    check_parts(
        models["llama"], [Part(29, ranks, "ulysses", order=order, node=node), Part(40, ranks, "ulysses", node=node)]
    )


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_megatron_with_history_equals_one_process(models: dict[str, Model], tp: int) -> None:
    check_parts(models["llama"], [Part(29, tp, "megatron", "megatron"), Part(50, tp, "megatron", "megatron")], tp)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("attn", ["ring", "ulysses"])
def test_growing_groups_equal_one_process(models: dict[str, Model], attn: str, order: str) -> None:
    check_parts(
        models["llama"],
        [Part(21, 1, attn, order=order), Part(34, 2, attn, order=order), Part(27, 4, attn, order=order)],
    )


@pytest.mark.parametrize("mlp", ["megatron", "ulysses"])
def test_groups_that_grow_over_tensor_parallel_regions(models: dict[str, Model], mlp: str) -> None:
    parts = [Part(21, 2, "megatron", mlp), Part(34, 4, "megatron", mlp), Part(27, 8, "megatron", mlp)]
    check_parts(models["llama"], parts, tp=2)


@pytest.mark.parametrize(
    ("family", "mlp", "node"),
    pairwise(["llama", "qwen2", "qwen3", "biased"], ["megatron", "ulysses"], [2, 4]),
)
def test_fast_sp_over_tensor_parallel_ranks_equals_one_process(
    models: dict[str, Model], family: str, mlp: str, node: int
) -> None:
    """Two tensor-parallel ranks a region, one or two regions a node, two regions."""
    parts = [Part(23, 4, "megatron", mlp, node=node), Part(18, 4, "megatron", mlp, node=node)]
    check_parts(models[family], parts, tp=2)


def test_whole_weights_from_more_ranks_than_kv_heads(models: dict[str, Model]) -> None:
    check_parts(models["qwen2"], [Part(23, 4, "megatron", "ulysses"), Part(18, 8, "megatron", "ulysses")], tp=4)


@pytest.mark.parametrize(("order", "tokens"), quick_diagonal(ORDERS, [1, 2, 3, 5]))
def test_fewer_tokens_than_ranks(models: dict[str, Model], order: str, tokens: int) -> None:
    """Members of the ring without a token of the chunk, and later without one of history."""
    check_parts(models["llama"], [Part(tokens, 4, order=order), Part(1, 4, order=order), Part(9, 6, order=order)])


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_fewer_tokens_than_ranks_in_every_combination(models: dict[str, Model], tokens: int) -> None:
    check_parts(
        models["llama"], [Part(tokens, 4, "ulysses"), Part(1, 4, "ulysses"), Part(tokens, 4, "ulysses", node=2)]
    )
    for mlp in ("megatron", "ulysses"):
        check_parts(models["llama"], [Part(tokens, 4, "megatron", mlp), Part(tokens, 4, "megatron", mlp)], tp=2)


def test_another_strategy_for_each_chunk(models: dict[str, Model]) -> None:
    check_parts(
        models["llama"],
        [Part(11, 1), Part(13, 2, "ulysses"), Part(12, 4, order="striped"), Part(9, 4, "ulysses", node=2), Part(5, 4)],
    )
    check_parts(
        models["qwen2"],
        [Part(11, 2, "megatron"), Part(13, 4, "megatron", "ulysses"), Part(7, 8, "megatron", "megatron")],
        tp=2,
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_that_go_to_the_keys(models: dict[str, Model], ranks: int, order: str) -> None:
    """Chunks in place: single tokens, several, on ranks that hold nothing yet, and what follows them."""

    def here(tokens: int, size: int) -> Part:
        return Part(tokens, size, order=order, in_place=True)

    check_parts(models["llama"], [here(9, ranks), here(1, ranks), here(1, ranks), here(12, ranks)])
    check_parts(models["llama"], [Part(21, 1), here(1, ranks), here(3, ranks), here(2, 6), Part(17, 6), here(1, 6)])


@pytest.mark.parametrize("node", [2, 4])
@pytest.mark.parametrize(("tp", "attn"), [(1, "ulysses"), (1, "megatron"), (2, "megatron")])
def test_rows_that_go_to_the_keys_of_nodes(models: dict[str, Model], tp: int, attn: str, node: int) -> None:
    own = [Part(21, 4, attn, "megatron", node=node)]
    check_parts(models["llama"], own + [Part(n, 4, attn, "megatron", node=node, in_place=True) for n in (1, 1, 5)], tp)


def test_in_place_over_kv_cut_otherwise_lays_it_out_again(models: dict[str, Model]) -> None:
    """Once: from heads to tokens, on all, on more, on fewer, from the heads of nodes, and back."""

    def here(tokens: int, size: int, attn: str = "ring", keepers: int = 0, node: int | None = None) -> Part:
        return Part(tokens, size, attn, order="first", in_place=True, keepers=keepers, node=node)

    by_heads = Part(21, 4, "ulysses")
    check_parts(models["llama"], [by_heads, here(1, 4, "ulysses"), here(1, 4), here(1, 4), here(3, 4, "ulysses")])
    check_parts(models["llama"], [by_heads, here(1, 4, keepers=2), here(1, 2), here(1, 6), here(2, 6, keepers=4)])
    check_parts(
        models["llama"], [Part(21, 4, "ulysses", node=2), here(1, 4, "ulysses", node=2), here(1, 6), here(1, 6)]
    )
    check_parts(models["qwen2"], [Part(21, 2, "ulysses"), here(1, 4), here(1, 4, keepers=2), Part(9, 4, "ulysses")])


def test_in_place_needs_all_holders_of_kv(models: dict[str, Model]) -> None:
    for attn in ("ring", "ulysses"):
        with pytest.raises(ConfigError, match="must include ranks"):
            check_parts(models["llama"], [Part(21, 2, attn), Part(1, 1, in_place=True)])


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[Part]]:
    tp = draw(st.sampled_from([1, 2]))
    size, parts = 1, []
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from([n for n in (1, 2, 4) if n >= size]))
        ranks = size * tp
        node = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n % tp == 0 and ranks % n == 0]))
        attn = draw(st.sampled_from(["megatron", "ulysses"] if tp == 1 else ["megatron"]))
        mlp = draw(st.sampled_from(["megatron", "ulysses"]))
        parts.append(Part(draw(st.integers(1, 40)), ranks, attn, mlp, draw(st.sampled_from(ORDERS)), node))
    return tp, parts


@settings(max_examples=10)
@given(cases(), st.sampled_from(["llama", "qwen2", "qwen3"]))
def test_any_order_of_layouts_equals_one_process(
    models: dict[str, Model], case: tuple[int, list[Part]], family: str
) -> None:
    check_parts(models[family], case[1], case[0])
