"""What the simulation knows of a request, from batches alone."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.request import Request


@dataclass
class Book:
    """What one request has been seen to do. `cursor` is the next token to be computed, in this life."""

    request: Request
    output: int
    cursor: int = 0
    generated: int = 0
    lives: int = 0
    decoding: bool = False
    aborted: bool = False
    started: int = 0
    is_long: bool = False
