"""The shared vocabulary: clocks, batches, spans; and the shapes of models, by hand-counted examples."""

from __future__ import annotations

import msgspec
import pytest

from headway.core.batch import Batch, Chunk, DecodeGroup, GroupBatch, KvOp, ManualClock, RemoteAttention
from headway.perf.device import available_bytes, gib
from headway.perf.hardware import ModelShape


def test_manual_clock_advances_and_refuses_to_go_back() -> None:
    clock = ManualClock(5.0)
    clock.advance(0.25)
    clock.advance(0.0)
    assert clock.now() == 5.25
    with pytest.raises(ValueError, match=r"cannot go back by 1\.0 s"):
        clock.advance(-1.0)
    assert clock.now() == 5.25


def test_batch_counts_its_rows_and_round_trips_through_msgpack() -> None:
    group = DecodeGroup(("a", "b"), 77, 3)
    batch = Batch(
        id=4,
        parts=(
            GroupBatch(
                0,
                group,
                (Chunk("c", 10, 5, False), Chunk("d", 0, 3, True)),
                (KvOp("reserve", "c", 2), KvOp("free", "z", 0)),
            ),
            GroupBatch(1, DecodeGroup(), assists=(RemoteAttention("c", 5, 0, 0, 8),)),
        ),
        predicted_s=0.25,
    )
    assert (batch.tokens, group.count) == (10, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch) == batch


LLAMA_3_8B = ModelShape(layers=32, hidden=4096, q_heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256)


def test_llama_3_8b_has_8_billion_parameters_and_128_kib_of_kv_a_token() -> None:
    assert LLAMA_3_8B.parameters == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_3_8B.kv_bytes_per_token == 131_072
    tied = msgspec.structs.replace(LLAMA_3_8B, tied_embeddings=True)
    assert LLAMA_3_8B.parameters - tied.parameters == 128_256 * 4096


def test_arithmetic_is_two_flops_a_weight_and_four_a_pair_and_causal() -> None:
    assert LLAMA_3_8B.linear_flops(10) == 2 * 10 * 32 * LLAMA_3_8B.layer_parameters
    assert LLAMA_3_8B.attention_flops(1, 0) == 4 * 32 * 32 * 128
    whole = LLAMA_3_8B.attention_flops(1000, 0)
    chunked = sum(LLAMA_3_8B.attention_flops(100, past) for past in range(0, 1000, 100))
    assert chunked == whole


def test_memory_is_counted_in_bytes_and_shown_in_binary_units() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
    assert (gib(3 << 29), gib(12 << 20), gib(0)) == ("1.5 GiB", "12.0 MiB", "0.0 MiB")
