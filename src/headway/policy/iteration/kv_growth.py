"""Growth of KV that a request holds: a decode's next tokens, and the next shard of a request in several groups."""

from __future__ import annotations

from headway.kv.block_manager import BlockManager, KvLease
from headway.policy.iteration.admission import KvBlockAdmission
from headway.policy.iteration.sequence import SequenceState


class KvGrowth:
    """Growth within one group's blocks."""

    def __init__(self, block_manager: BlockManager, admission: KvBlockAdmission) -> None:
        self._reserve_tokens = block_manager.reserve_tokens
        self._block_manager = block_manager
        self._admission = admission

    def grow(self, sequence: SequenceState) -> bool:
        """Grow a decode's lease, by the pool's `reserve_tokens` if possible, else by one token.

        False: no block, or the shard is full."""
        lease = sequence.lease
        assert lease is not None
        most = sequence.prompt + sequence.request.max_output_tokens
        need = sequence.computed + 1 - sequence.base
        if need > sequence.limit:
            return False
        # A larger step grows rarely; it stops at the request's own end and at the edge of its shard.
        wanted = max(need, min(need + self._reserve_tokens, most - sequence.base, sequence.limit))
        return self._block_manager.grow(lease, wanted) or self._block_manager.grow(lease, need)

    def next_shard(self, sequence: SequenceState, start: int) -> KvLease | None:
        """Reserve the next shard, from token `start` on, of a request that has filled its shard in another group.

        None: too few free blocks. A prefill reserves its known tokens up to the shard's limit, and leaves headroom; a
        decode leaves none."""
        most = sequence.prompt + sequence.request.max_output_tokens
        known = max(1, min(sequence.known, start + sequence.limit) - start)
        tokens = max(1, min(sequence.known + self._reserve_tokens, most, start + sequence.limit) - start)
        blocks = self._block_manager.blocks_for(tokens)
        headroom = 0 if sequence.decoding else self._admission.headroom(sequence, blocks)
        name = sequence.request.id
        # First with room for output, then for the known tokens only.
        return self._block_manager.reserve(name, tokens, headroom, start) or self._block_manager.reserve(
            name, known, headroom, start
        )
