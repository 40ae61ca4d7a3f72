"""Gathering a stage's whole weights within a TP region, for Ulysses (PecSched §5.3, steps 1 and 4). Pure data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from headway.runtime.model.config import DecoderConfig
from headway.runtime.model.shard import WHOLE as WHOLE_MODEL
from headway.runtime.model.shard import ModelShard
from headway.runtime.sequence_parallel.group import SpGroup
from headway.runtime.sequence_parallel.steps import Between, ExchangeRows, Matrix, Pairs, RegisterSlice, exchange

OWN, WHOLE = "own", "whole"


def gathered_weights(
    config: DecoderConfig, group: SpGroup, index: int, stage: Literal["attention", "mlp"]
) -> tuple[ExchangeRows, ...]:
    """From registers `own.<matrix>.weight` and `own.<matrix>.bias` of the region's ranks to `whole.…` on each."""
    hidden, tp = config.hidden_size, group.tp
    first, second = _MATRICES[stage]
    size, inner = _outputs(config, first), len(_inputs(config, second, WHOLE_MODEL))

    def make(name: str, shape: tuple[int, int], between: Between) -> ExchangeRows:
        return exchange(f"{OWN}.{name}", f"{WHOLE}.{name}", shape, index, group.region(index), group.ranks, between)

    def rows(width: int) -> Between:
        def between(i: int, j: int) -> Pairs:
            taken = _taken(config, tp, first, i % tp, j % tp)
            return (
                tuple(RegisterSlice(own.start, own.stop, 0, width) for own, _ in taken),
                tuple(RegisterSlice(whole.start, whole.stop, 0, width) for _, whole in taken),
            )

        return between

    def columns(i: int, _: int) -> Pairs:
        held = _inputs(config, second, ModelShard(i % tp, tp))
        return (RegisterSlice(0, hidden, 0, len(held)),), (RegisterSlice(0, hidden, held.start, held.stop),)

    def from_first(i: int, _: int) -> Pairs:
        cut = (RegisterSlice(0, hidden, 0, 1),)
        # The bias of a summed layer is held by the first rank of the region alone (`model.loading`).
        return (cut, cut) if i % tp == 0 else ((), ())

    parts = [make(f"{first}.weight", (size, hidden), rows(hidden)), make(f"{second}.weight", (hidden, inner), columns)]
    if config.qkv_bias if stage == "attention" else config.mlp_bias:
        parts.append(make(f"{first}.bias", (size, 1), rows(1)))
    if config.out_bias if stage == "attention" else config.mlp_bias:
        parts.append(make(f"{second}.bias", (hidden, 1), from_first))
    return tuple(parts)


_MATRICES: dict[str, tuple[Matrix, Matrix]] = {"attention": ("qkv", "out"), "mlp": ("gate_up", "down")}


def _outputs(config: DecoderConfig, matrix: Matrix) -> int:
    """Rows of a whole matrix whose outputs are cut."""
    return 2 * config.mlp_size if matrix == "gate_up" else (config.q_heads + 2 * config.kv_heads) * config.head_dim


def _inputs(config: DecoderConfig, matrix: Matrix, shard: ModelShard) -> range:
    """A shard's columns of a matrix whose inputs are cut."""
    return shard.mlp(config) if matrix == "down" else _scaled(shard.q_heads(config), config.head_dim)


def _taken(config: DecoderConfig, tp: int, matrix: Matrix, source: int, target: int) -> list[tuple[range, range]]:
    """Rows of rank `source`'s own matrix that `target` takes from it, with their place in the whole one.

    A KV head that several ranks hold comes from the target itself, else from the first of them.
    """
    shard = ModelShard(source, tp)
    if matrix == "gate_up":
        own, size = shard.mlp(config), config.mlp_size
        return [(_moved(own, part * len(own) - own.start), _moved(own, part * size)) for part in (0, 1)]
    dim, q, kv = config.head_dim, shard.q_heads(config), shard.kv_heads(config)
    owner = _owner(config, tp, target)
    # With more ranks than KV heads a head has several holders: exactly one of them gives it.
    given = [head for head in kv if owner(head) == source]
    taken = [(_scaled(range(len(q)), dim), _scaled(q, dim))]
    for part in (0, 1):
        # Rows are queries, then keys (part 0), then values (part 1), in the rank's own matrix as in the whole one.
        at, whole = len(q) + part * len(kv) - kv.start, config.q_heads + part * config.kv_heads
        taken += [
            (_scaled(range(at + h, at + h + 1), dim), _scaled(range(whole + h, whole + h + 1), dim)) for h in given
        ]
    return taken


def _owner(config: DecoderConfig, tp: int, target: int) -> Callable[[int], int]:
    held = [ModelShard(rank, tp).kv_heads(config) for rank in range(tp)]

    def owner(head: int) -> int:
        return target if head in held[target] else next(rank for rank in range(tp) if head in held[rank])

    return owner


def _scaled(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
