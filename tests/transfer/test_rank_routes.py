"""Which rank sends which heads to which: every head once to each who has it, from somebody who has it."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.engine.protocol import PeerAddress, end_of, heads_of, instance_of, named, rank_of, routes
from headway.runtime.model.config import DecoderConfig, ModelShard, RopeConfig, divides

CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=101, hidden_size=64, layers=2, q_heads=8, kv_heads=2, head_dim=8,
    mlp_size=50, rms_eps=1e-5, rope=RopeConfig("default", 1e4, 8, 512), max_positions=512, max_model_len=512,
)  # fmt: skip


def config_of(kv_heads: int, group: int) -> DecoderConfig:
    return dataclasses.replace(CONFIG, kv_heads=kv_heads, q_heads=kv_heads * group)


CONFIGS = st.builds(config_of, st.integers(1, 8), st.integers(1, 8))


def ranks_for(config: DecoderConfig) -> st.SearchStrategy[int]:
    """Tensor-parallel degrees by which a model can be cut."""
    return st.sampled_from([ranks for ranks in range(1, 17) if divides(config, ranks)])


def cut_in_two_ways(config: DecoderConfig) -> st.SearchStrategy[tuple[DecoderConfig, int, int]]:
    return st.tuples(st.just(config), ranks_for(config), ranks_for(config))


@given(CONFIGS.flatmap(cut_in_two_ways))
def test_a_ranks_heads_are_those_of_its_shard(cut: tuple[DecoderConfig, int, int]) -> None:
    config, ranks, _ = cut
    for rank in range(ranks):
        assert heads_of(config.kv_heads, ranks, rank) == ModelShard(rank, ranks).kv_heads(config)


@given(CONFIGS.flatmap(cut_in_two_ways))
def test_each_rank_gets_each_of_its_heads_once_from_a_rank_that_holds_it(cut: tuple[DecoderConfig, int, int]) -> None:
    config, sources, targets = cut
    kv = config.kv_heads
    found = routes(kv, sources, targets)
    for (source, _), heads in found.items():
        assert set(heads) <= set(heads_of(kv, sources, source))
    for target in range(targets):
        got = [head for (_, to), heads in found.items() if to == target for head in heads]
        assert sorted(got) == list(heads_of(kv, targets, target))


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_copies_of_a_head_take_turns(kv: int, copies: int, ahead: int) -> None:
    """Where both sides have every head several times, nobody sends more than one copy above another's."""
    found = routes(kv, kv * copies, kv * copies * ahead)
    sent = [sum(source == rank for source, _ in found) for rank in range(kv * copies)]
    assert max(sent) - min(sent) <= 1


@given(st.integers(0, 60_000), st.integers(0, 500))
def test_an_end_names_its_request(instance: int, rank: int) -> None:
    end = end_of(instance, rank)
    assert (instance_of(end), rank_of(end)) == (instance, rank)


def test_peer_and_messages_of_an_end() -> None:
    assert named(end_of(3, 0)) == "instance 3"
    assert named(end_of(3, 2)) == "instance 3 (worker 2)"
    assert PeerAddress(4, 1, "unix:a", ("unix:b", "unix:c")).ends() == [
        PeerAddress(4, 1, "unix:a"), PeerAddress(end_of(4, 1), 1, "unix:b"), PeerAddress(end_of(4, 2), 1, "unix:c"),
    ]  # fmt: skip
