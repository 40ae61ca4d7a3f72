"""Tables beyond their knots, the roofline that is compiled to them, and the files they are kept in."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.latency_models import RATES, SHAPE, gpu_roofline, table

from headway.core.errors import ConfigError
from headway.perf.latency import table as store
from headway.perf.latency.base import MAX_CHUNK
from headway.perf.latency.table import TableLatency, TableSource

RISING = st.lists(st.tuples(st.integers(1, 500), st.floats(0, 1e-2)), min_size=2, max_size=8)
SOURCE = TableSource(
    fingerprint="model|cpu",
    provenance="test",
    tokens=((0, 1e-3), (64, 2e-3)),
    chunks=((0, 0.0, 0.0), (64, 1e-3, 1e-7)),
    decode=(1e-4, 1e-5, 1e-8),
    validated_past=4096,
    details={"threads": 2},
)


@given(RISING)
@settings(max_examples=40)
def test_rows_are_monotone_where_knots_are_and_finite_far_beyond(steps: list[tuple[int, float]]) -> None:
    at, seconds, knots = 0, 1e-4, []
    for rows, more in steps:
        knots.append((at, seconds))
        at, seconds = at + rows, seconds + more
    model = table(knots, [(1, 0.0, 0.0), (2, 0.0, 0.0)], (0, 0, 0))
    near, far = model.token_s(0, 4_000), model.token_s(2 * MAX_CHUNK - 10, 2 * MAX_CHUNK + 1_000)
    for values in (near, far, model.token_s(10**7, 10**7 + 10)):
        assert np.all(np.isfinite(values))
        assert np.all(np.diff(values) >= -1e-15)
    for rows, value in knots:
        assert float(model.token_s(rows, rows)[0]) == pytest.approx(value)
    assert near[-1] <= far[0]
    assert far[-1] <= model.token_s(10**7, 10**7)[0]


def test_a_table_that_ends_on_a_falling_step_does_not_fall_for_ever() -> None:
    model = table([(0, 1e-3), (2 * MAX_CHUNK - 1, 5.0), (2 * MAX_CHUNK, 4.0)], [(1, 0, 0), (2, 0, 0)], (0, 0, 0))
    assert model.token_s(10**7, 10**7)[0] > 3.9


def test_a_slice_and_single_look_ups_agree_across_the_edge_of_the_table() -> None:
    model = gpu_roofline()
    edge = 2 * MAX_CHUNK
    rows = range(edge - 5, edge + 6)
    assert model.token_s(rows[0], rows[-1]) == pytest.approx([model.token_s(n, n)[0] for n in rows])
    chunks = range(MAX_CHUNK - 5, MAX_CHUNK + 6)
    inside, beyond = model.chunk_s(1000, chunks[0], MAX_CHUNK), model.chunk_s(1000, MAX_CHUNK + 1, chunks[-1])
    pieces = [*inside.tolist(), *beyond.tolist()]
    assert pieces == pytest.approx([model.attention_s(1000, n) for n in chunks])
    assert pieces == sorted(pieces)


def test_beyond_the_last_chunk_attention_is_that_of_its_pieces_and_linear_in_the_past() -> None:
    model = table([(0, 0.0), (1, 0.0)], [(1, 1e-6, 1e-9), (512, 1e-3, 1e-7)], (0, 0, 0))
    for pieces in (2, 7):
        assert model.attention_s(0, 512 * pieces) == pytest.approx(
            sum(model.attention_s(512 * i, 512) for i in range(pieces))
        )
    assert model.attention_s(0, 4 * MAX_CHUNK) == pytest.approx(16 * model.attention_s(0, MAX_CHUNK))
    assert model.attention_s(2_000_000, 512) - model.attention_s(1_000_000, 512) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("tokens", "what"),
    [
        (((0, 1e-3),), "at least two token knots, found 1"),
        (((0, 1e-3), (0, 2e-3)), "must ascend"),
        (((5, 1e-3), (2, 2e-3)), "must ascend"),
        (((0, 1e-3), (2, float("nan"))), "be finite"),
    ],
)
def test_impossible_knots_are_refused(tokens: tuple[tuple[int, float], ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        TableLatency(msgspec.structs.replace(SOURCE, tokens=tokens))


def test_the_roofline_is_the_larger_of_traffic_and_arithmetic() -> None:
    model = gpu_roofline()
    weights_s = (SHAPE.layers * SHAPE.layer_parameters + SHAPE.vocab * SHAPE.hidden) * 2 / RATES.bandwidth
    assert model.token_s(1, 1)[0] == pytest.approx(RATES.fixed_s + weights_s)
    assert model.token_s(8192, 8192)[0] == pytest.approx(RATES.fixed_s + SHAPE.linear_flops(8192) / RATES.linear_flops)
    assert model.token_s(0, 0)[0] == pytest.approx(RATES.fixed_s)
    # one row over a long past reads KV; many rows compute
    assert model.attention_s(10**6, 1) >= SHAPE.kv_bytes_per_token * 10**6 / RATES.bandwidth * 0.999
    compute_s = SHAPE.attention_flops(2048, 10**6) / RATES.attention_flops
    assert model.attention_s(10**6, 2048) == pytest.approx(compute_s)


def test_saved_profile_loads_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "profile.json"
    store.save(SOURCE, path)
    assert store.load(path, "model|cpu") == SOURCE
    assert store.load(path, None) == SOURCE
    assert list(path.parent.iterdir()) == [path]


def test_a_profile_of_something_else_is_refused_and_both_are_named(tmp_path: Path) -> None:
    store.save(SOURCE, tmp_path / "p.json")
    with pytest.raises(ConfigError, match=r"(?s)measured for\s+model\|cpu.*not for\s+model\|gpu.*headway profile"):
        store.load(tmp_path / "p.json", "model|gpu")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"schema": "headway.latency/1"}', b"\xff\xfe", b'{"fingerprint": "\xff"}', b"null"],
)
def test_a_file_that_is_no_profile_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"p\.json is not a latency profile"):
        store.load(path, None)


def test_a_later_schema_is_refused(tmp_path: Path) -> None:
    store.save(msgspec.structs.replace(SOURCE, schema="headway.latency/9"), tmp_path / "p.json")
    with pytest.raises(ConfigError, match=r"headway\.latency/9"):
        store.load(tmp_path / "p.json", None)


def test_a_missing_profile_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the latency profile"):
            store.load(path, None)


def test_default_path_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, two = (store.default_path(store.fingerprint("m", "bf16", "cpu", n)) for n in (1, 2))
    assert one.parent == tmp_path / "headway" / "latency"
    assert one != two
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert store.default_path("x").is_relative_to(tmp_path / "home" / ".cache")
