"""What a rank does in a layer, as data: what moves between registers of different ranks, and what is computed between.

A register is a matrix under a name. Each is read once, which also frees it; `ROWS`, the residual stream, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from headway.runtime.sequence_parallel.mask_blocks import MaskBlock
from headway.runtime.sequence_parallel.ring import RingStep
from headway.runtime.sequence_parallel.tokens import Positions

ROWS = "rows"

Matrix = Literal["qkv", "out", "gate_up", "down"]


class RegisterSlice(NamedTuple):
    """A rectangle of a register."""

    row: int
    row_end: int
    column: int
    column_end: int

    @property
    def size(self) -> int:
        return (self.row_end - self.row) * (self.column_end - self.column)


class PeerMessage(NamedTuple):
    """One message to or from rank `peer`: these cuts, one after the other."""

    peer: int
    cuts: tuple[RegisterSlice, ...]


@dataclass(frozen=True, slots=True)
class ExchangeRows:
    """Cuts of register `source` become cuts of the peers' registers `target`, (rows, columns) here.

    A piece from a rank to itself is in both lists. add: pieces are summed, in the order of `receives`, else they tile
    the target. Gathering rows, scattering sums, the two all-to-alls of Ulysses and gathering weights are of this kind.
    """

    source: str
    target: str
    rows: int
    columns: int
    sends: tuple[PeerMessage, ...]
    receives: tuple[PeerMessage, ...]
    add: bool = False


@dataclass(frozen=True, slots=True)
class EmbedTokens:
    """Tokens at `positions` to rows; with a cut vocabulary this rank's part of the sum."""

    target: str
    positions: Positions


@dataclass(frozen=True, slots=True)
class NormRows:
    """Normalise ROWS, `source`, with the layer's norm or the final one."""

    which: Literal["attention", "mlp", "final"]
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class ProjectHeads:
    """Rows to rotated query, key and value heads, of this rank's weights or of whole ones."""

    source: str
    target: str
    positions: Positions
    whole: bool


@dataclass(frozen=True, slots=True)
class RingAttend:
    """Store the chunk's keys and values behind `past` tokens of history, then go round the ring: blocks come from rank
    `before` and go to rank `behind`.
    """

    source: str
    target: str
    steps: tuple[RingStep, ...]
    past: int
    before: int
    behind: int


class MemberRows(NamedTuple):
    """Rows of another rank that are attended over this rank's keys."""

    rank: int
    """The rows' rank."""
    rows: int
    blocks: tuple[MaskBlock, ...]
    """Which of this rank's keys they see."""
    attended: bool
    """Whether this rank's rows see any of that rank's keys."""


@dataclass(frozen=True, slots=True)
class AttendInPlace:
    """Store the chunk's keys and values behind `past` tokens of history; then rows go to the keys. Each of `members`,
    this rank among them, gets the answer of its rows over this rank's keys, and this rank's rows get theirs.
    """

    source: str
    target: str
    members: tuple[MemberRows, ...]
    past: int


@dataclass(frozen=True, slots=True)
class ProjectOutput:
    """The projection after attention."""

    source: str
    target: str
    whole: bool


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The MLP."""

    source: str
    target: str
    whole: bool


@dataclass(frozen=True, slots=True)
class AddRows:
    """Add to ROWS."""

    source: str


@dataclass(frozen=True, slots=True)
class ComputeLogits:
    """Rows to logits of this rank's slice of the vocabulary, fp32."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class WholeLayer:
    """A whole layer over ROWS, for a rank that has all of it: `steps` in the place of attention turn register `source`,
    query, key and value heads at `positions`, rotated, into `target`.
    """

    positions: Positions
    source: str
    target: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class StartWeights:
    """Begin to gather a stage's whole weights, of this layer or (`ahead`) of the next."""

    parts: tuple[ExchangeRows, ...]
    ahead: bool


@dataclass(frozen=True, slots=True)
class FinishWeights:
    """Wait for the weights whose gathering began first."""


@dataclass(frozen=True, slots=True)
class StartHistory:
    """Begin to move KV of earlier chunks, of this layer or (`ahead`) of the next."""

    ahead: bool


@dataclass(frozen=True, slots=True)
class FinishHistory:
    """Wait for this layer's KV of earlier chunks."""


Step = (
    ExchangeRows | EmbedTokens | NormRows | ProjectHeads | RingAttend | AttendInPlace | ProjectOutput
    | FeedForward | AddRows | ComputeLogits | WholeLayer | StartWeights
    | FinishWeights | StartHistory | FinishHistory
)  # fmt: skip

Pairs = tuple[tuple[RegisterSlice, ...], tuple[RegisterSlice, ...]]
"""Cuts of a source, and the cuts of a target that they become."""

Between = Callable[[int, int], Pairs]
"""What goes from rank i to rank j, both being indices of a group."""


def exchange(
    source: str,
    target: str,
    shape: tuple[int, int],
    index: int,
    peers: Iterable[int],
    ranks: tuple[int, ...],
    between: Between,
    add: bool = False,
) -> ExchangeRows:
    """The part in an exchange of the rank at `index`: what goes out to and comes in from each of `peers` (indices)."""
    sends, receives = [], []
    for peer in peers:
        out, into = _filled(between(index, peer)[0]), _filled(between(peer, index)[1])
        if out:
            sends.append(PeerMessage(ranks[peer], out))
        if into:
            receives.append(PeerMessage(ranks[peer], into))
    return ExchangeRows(source, target, *shape, tuple(sends), tuple(receives), add)


def _filled(cuts: tuple[RegisterSlice, ...]) -> tuple[RegisterSlice, ...]:
    return tuple(cut for cut in cuts if cut.size)
