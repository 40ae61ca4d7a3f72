"""Registers and the exchanges between them: the only place where activations and weights leave a rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headway.runtime.sequence_parallel.steps import ROWS, ExchangeRows, PeerMessage, RegisterSlice
from headway.runtime.sequence_parallel.transport import MessageStream, TensorTransport


class MatrixRegisters(dict[str, Tensor]):
    """Matrices by name."""

    def take(self, name: str) -> Tensor:
        """Return a register and remove it, unless it is the residual stream."""
        return self[name] if name == ROWS else self.pop(name)


def start_exchange(
    transport: TensorTransport, step: ExchangeRows, source: Tensor, stream: MessageStream
) -> Callable[[], Tensor]:
    """Begin an exchange; the result waits for it and returns the target."""
    rank = transport.rank
    target = source.new_empty(step.rows, step.columns)
    sends = [(piece.peer, packed(source, piece)) for piece in step.sends]
    own = next((data for peer, data in sends if peer == rank), None)
    parts = [(piece, own if piece.peer == rank else _room(target, piece, step.add)) for piece in step.receives]
    wait = transport.exchange(
        [(peer, data) for peer, data in sends if peer != rank],
        [(piece.peer, data) for piece, data in parts if piece.peer != rank and data is not None],
        stream,
    )

    def finish() -> Tensor:
        wait()
        if step.add:
            return _summed(target, parts)
        for piece, data in parts:
            assert data is not None
            unpack(target, piece, data)
        return target

    return finish


def packed(source: Tensor, piece: PeerMessage) -> Tensor:
    """Return a message's cuts as one contiguous tensor: a view where they are one block of whole rows."""
    parts = [_cut(source, cut) for cut in piece.cuts]
    if len(parts) == 1:
        return parts[0].contiguous().view(-1)
    return torch.cat([part.reshape(-1) for part in parts])


def unpack(target: Tensor, piece: PeerMessage, data: Tensor) -> None:
    """Copy a received message into its cuts of the target, unless it was received in place."""
    at = 0
    for cut in piece.cuts:
        view = _cut(target, cut)
        part = data[at : at + cut.size]
        # Equal addresses: `_room` let the message be received into the target itself.
        if view.data_ptr() != part.data_ptr():
            view.copy_(part.view(view.shape))
        at += cut.size


def _summed(target: Tensor, parts: list[tuple[PeerMessage, Tensor | None]]) -> Tensor:
    """Sum parts, each of the target's shape, in an order that is the same on every rank."""
    if not parts:
        return target
    for place, (_, data) in enumerate(parts):
        assert data is not None
        part = data.view(target.shape)
        target.copy_(part) if place == 0 else target.add_(part)
    return target


def _room(target: Tensor, piece: PeerMessage, add: bool) -> Tensor:
    """Return the receive buffer of a message: the target itself where its cut is one block of whole rows."""
    if len(piece.cuts) == 1 and not add:
        view = _cut(target, piece.cuts[0])
        if view.is_contiguous():
            return view.view(-1)
    return target.new_empty(sum(cut.size for cut in piece.cuts))


def _cut(matrix: Tensor, cut: RegisterSlice) -> Tensor:
    return matrix[cut.row : cut.row_end, cut.column : cut.column_end]
