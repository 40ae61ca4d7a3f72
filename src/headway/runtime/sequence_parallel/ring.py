"""Schedule of ring attention: for each step the keys that a member attends to, the mask blocks, and the transfers.

Every member begins with its own keys and passes on what it has just begun to attend to (Liu et al. 2023), history
included (Tetris §5). A member's keys travel as one block: its share of history, then its tokens of the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headway.runtime.sequence_parallel.mask_blocks import MaskBlock, mask_blocks
from headway.runtime.sequence_parallel.tokens import Positions


class RingStep(NamedTuple):
    """Attend to the keys of member `source` (as many as `keys`) while they go to the next member, and those of member
    `arriving` (`arriving_keys`) come from the one before; -1 in the last step. Nothing travels where there are no keys.
    """

    source: int
    keys: int
    arriving: int
    arriving_keys: int
    blocks: tuple[MaskBlock, ...]


def ring(member: int, fresh: Sequence[Positions], past: Sequence[int]) -> tuple[RingStep, ...]:
    """Return the steps of one member. fresh: all members' tokens of the chunk; past: all members' share of history."""
    members = len(fresh)
    steps = []
    for step in range(members):
        # Blocks travel from member i to i + 1: after k steps a member has the block of member i - k.
        source, arriving = (member - step) % members, (member - step - 1) % members
        last = step == members - 1
        steps.append(
            RingStep(
                source,
                past[source] + len(fresh[source]),
                -1 if last else arriving,
                0 if last else past[arriving] + len(fresh[arriving]),
                mask_blocks(fresh[member], fresh[source], past[source]),
            )
        )
    return tuple(steps)
