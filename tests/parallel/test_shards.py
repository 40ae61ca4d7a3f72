"""Every weight of a model is held exactly once over the ranks of a layout, KV heads aside where there are too few."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from headway.perf.hardware import ParallelLayout
from headway.runtime.executor.plans import place_of, places
from headway.runtime.executor.profiling import numbers
from headway.runtime.model.config import WHOLE, DecoderConfig, ModelShard, RopeConfig, divides

BASE = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=101, hidden_size=64, layers=5, q_heads=8, kv_heads=2, head_dim=8,
    mlp_size=50, rms_eps=1e-5, rope=RopeConfig("default", 1e4, 8, 512), max_positions=512, max_model_len=512,
)  # fmt: skip


def config_of(layers: int, kv_heads: int, group: int, mlp: int, vocab: int) -> DecoderConfig:
    return dataclasses.replace(
        BASE, layers=layers, kv_heads=kv_heads, q_heads=kv_heads * group, mlp_size=mlp, vocab_size=vocab
    )


CONFIGS = st.builds(
    config_of, st.integers(1, 9), st.integers(1, 6), st.integers(1, 6), st.integers(8, 99), st.integers(8, 200)
)


@given(CONFIGS, st.integers(1, 8), st.integers(1, 5))
def test_slices_cover_heads_mlp_vocabulary_and_layers(config: DecoderConfig, ranks: int, stages: int) -> None:
    stages = min(stages, config.layers)
    held = [layer for stage in range(stages) for layer in ModelShard(stage=stage, stages=stages).layers(config)]
    assert held == list(range(config.layers))
    shards = [ModelShard(rank, ranks) for rank in range(ranks)]
    assert [word for shard in shards for word in shard.vocabulary(config)] == list(range(config.vocab_size))
    assert [row for shard in shards for row in shard.mlp(config)] == list(range(config.mlp_size))
    if not divides(config, ranks):
        return
    assert [head for shard in shards for head in shard.q_heads(config)] == list(range(config.q_heads))
    group = config.q_heads // config.kv_heads
    for shard in shards:
        assert {head // group for head in shard.q_heads(config)} == set(shard.kv_heads(config))
        local = shard.local(config)
        assert local.q_heads % local.kv_heads == 0
        first = shard.kv_heads(config).start
        for index, head in enumerate(shard.q_heads(config)):  # what the attention primitive assumes of local numbers
            assert head // group - first == index // (local.q_heads // local.kv_heads)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_rank_numbers_and_places_are_inverse(tp: int, stages: int, kvp: int) -> None:
    layout = ParallelLayout(tp=tp, stages=stages, kvp=kvp)
    assert [place.rank for place in places(layout)] == list(range(layout.accelerators))
    for place in places(layout):
        assert place_of(layout, place.rank) == place
        assert place.rank in place.stage_ranks
        assert place.drawer.draws
        assert not any(reader.draws for reader in place.readers)
        assert {reader.rank for reader in place.readers} | {place.drawer.rank} >= {
            other.rank for other in places(layout) if other.embeds and other.group == place.group
        }


@given(CONFIGS, st.sampled_from((1, 2, 4)), st.integers(1, 3))
def test_parameters_of_all_shards_add_up_to_the_model(config: DecoderConfig, ranks: int, stages: int) -> None:
    stages = min(stages, config.layers)
    if not divides(config, ranks) or config.kv_heads % ranks:
        return
    parts = [ModelShard(rank, ranks, stage, stages) for rank in range(ranks) for stage in range(stages)]
    assert sum(numbers(config, part) for part in parts) == numbers(config, WHOLE)
