"""Who gets KV in a group, and how much: what an entering request reserves, what a decode grows by."""

from __future__ import annotations

from headway.core.errors import RequestError
from headway.core.request import Request
from headway.kv.block_manager import BlockManager, KvLease
from headway.kv.staged_kv import StagedKv
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.sequence import SequenceState


def refuse_unservable(request: Request, total_tokens: int) -> None:
    """Raises RequestError when a request could not be served even alone, by a KV cache of so many tokens."""
    need = request.prompt_tokens + 1
    if need > total_tokens:
        raise RequestError(
            f"the prompt has {request.prompt_tokens} tokens and the KV cache holds {total_tokens}: "
            "shorten the prompt or start the server with more KV memory",
            "prompt",
        )
    if need - 2 + request.max_output_tokens > total_tokens:  # alone it would run dry and wait for ever
        raise RequestError(
            f"{request.prompt_tokens} prompt and {request.max_output_tokens} output tokens do not fit the KV cache "
            f"of {total_tokens} tokens: ask for less output or give the server more KV memory",
            "max_tokens",
        )


class KvBlockAdmission:
    """Reserves in one ledger. `holders` are the requests whose rows are computed here and that hold KV; `custody` holds
    the rest, and has a line of its own."""

    def __init__(self, config: SchedulerConfig, ledger: BlockManager, custody: StagedKv) -> None:
        self._config = config
        self.ledger = ledger
        self.custody = custody
        self.holders: dict[str, SequenceState] = {}

    def fits(self, sequence: SequenceState) -> bool:
        """Whether a request could enter now."""
        tokens = self._wanted(sequence)
        return self.ledger.blocks_for(tokens) + self._headroom(sequence, tokens) <= self.ledger.free_blocks

    def spare_blocks(self, sequence: SequenceState) -> int:
        """How many blocks short requests may still enter with past this one, which has waited too long: while they hold
        no more than the headroom together, it gets in as soon as it would without them. 0: nobody may pass it."""
        headroom = int(self._config.kv_headroom * self.ledger.n_blocks)
        beside = self.blocks(sequence) + headroom <= self.ledger.n_blocks
        return max(0, headroom - self._short_blocks()) if sequence.is_long and beside else 0

    def blocks(self, sequence: SequenceState) -> int:
        """What a request would enter with."""
        return self.ledger.blocks_for(self._wanted(sequence))

    def enter(self, sequence: SequenceState) -> bool:
        """Reserve for a request that is about to get its first tokens here. False: there is not enough."""
        tokens = self._wanted(sequence)
        headroom = self._headroom(sequence, tokens)
        lease = self.ledger.reserve(sequence.request.id, tokens, headroom, start=sequence.base)
        if lease is None:
            return False
        sequence.skipped_since = None
        sequence.lease = lease
        self.holders[sequence.request.id] = sequence
        return True

    def shard(self, sequence: SequenceState, start: int) -> KvLease | None:
        """A lease for what comes from token `start` on, of a request that has filled its shard elsewhere. A prefill
        needs all of its next shard, and leaves headroom; a decode takes what there is."""
        most = sequence.prompt + sequence.request.max_output_tokens
        known = min(sequence.known, start + sequence.limit) - start
        tokens = min(sequence.known + self._config.reserve_tokens, most, start + sequence.limit) - start
        headroom = 0 if sequence.decoding else self._headroom(sequence, max(1, tokens))
        name = sequence.request.id
        return self.ledger.reserve(name, max(1, tokens), headroom, start) or self.ledger.reserve(
            name, max(1, known), headroom, start
        )

    def grow(self, sequence: SequenceState) -> bool:
        """KV for a decode's next tokens, by a quantum if possible. False: there is none, or its shard is full."""
        lease = sequence.lease
        assert lease is not None
        most = sequence.prompt + sequence.request.max_output_tokens
        need = sequence.computed + 1 - sequence.base
        if need > sequence.limit:
            return False
        wanted = max(need, min(need + self._config.reserve_tokens, most - sequence.base, sequence.limit))
        return self.ledger.grow(lease, wanted) or self.ledger.grow(lease, need)

    def _wanted(self, sequence: SequenceState) -> int:
        """Tokens of a request that enters."""
        most = sequence.prompt + sequence.request.max_output_tokens
        return max(1, min(sequence.known + self._config.reserve_tokens, most, self.ledger.total_tokens, sequence.limit))

    def _headroom(self, sequence: SequenceState, tokens: int) -> int:
        """Blocks that must stay free beside so many tokens of this request. Once a long one has been skipped, what
        shorts hold counts towards the headroom that it leaves them."""
        if not (sequence.is_long and self.holders):
            return 0
        headroom = int(self._config.kv_headroom * self.ledger.n_blocks)
        left = self.ledger.free_blocks - self.ledger.blocks_for(tokens)
        if sequence.skipped_since is not None and 0 <= left < headroom:
            return max(0, headroom - self._short_blocks())
        return headroom

    def _short_blocks(self) -> int:
        return sum(s.lease.blocks for s in self.holders.values() if s.lease is not None and not s.is_long)
