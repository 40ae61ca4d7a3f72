"""Who gets KV in a group, and how much: what an entering request reserves, what a decode grows by."""

from __future__ import annotations

from headway.core.errors import RequestError
from headway.core.request import Request
from headway.kv.ledger import Lease, Ledger
from headway.scheduling.config import SchedulerConfig
from headway.scheduling.sequence import Sequence


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


class Admission:
    """Reserves in one ledger. `holders` are the requests whose rows are computed here and that hold KV."""

    def __init__(self, config: SchedulerConfig, ledger: Ledger) -> None:
        self._config = config
        self.ledger = ledger
        self.holders: dict[str, Sequence] = {}

    def fits(self, sequence: Sequence) -> bool:
        """Whether a request could enter now."""
        tokens, headroom = self._wanted(sequence)
        return self.ledger.blocks_for(max(tokens, 1)) + headroom <= self.ledger.free_blocks

    def enter(self, sequence: Sequence) -> bool:
        """Reserve for a request that is about to get its first tokens here. False: there is not enough."""
        lease = self.ledger.reserve(sequence.request.id, *self._wanted(sequence), start=sequence.base)
        if lease is None:
            return False
        sequence.skipped_since = None
        sequence.lease = lease
        self.holders[sequence.request.id] = sequence
        return True

    def shard(self, sequence: Sequence, start: int) -> Lease | None:
        """A lease for what comes from token `start` on, of a request that has filled its shard elsewhere. A prefill
        needs all of its next shard, and leaves headroom; a decode takes what there is."""
        most = sequence.prompt + sequence.request.max_output_tokens
        known = min(sequence.known, start + sequence.limit) - start
        tokens = min(sequence.known + self._config.reserve_tokens, most, start + sequence.limit) - start
        headroom = 0 if sequence.decoding else self._headroom(sequence)
        name = sequence.request.id
        return self.ledger.reserve(name, max(1, tokens), headroom, start) or self.ledger.reserve(
            name, max(1, known), headroom, start
        )

    def grow(self, sequence: Sequence) -> bool:
        """KV for a decode's next tokens, by a quantum if possible. False: there is none, or its shard is full."""
        lease = sequence.lease
        assert lease is not None
        most = sequence.prompt + sequence.request.max_output_tokens
        need = sequence.computed + 1 - sequence.base
        if need > sequence.limit:
            return False
        wanted = max(need, min(need + self._config.reserve_tokens, most - sequence.base, sequence.limit))
        return self.ledger.grow(lease, wanted) or self.ledger.grow(lease, need)

    def _wanted(self, sequence: Sequence) -> tuple[int, int]:
        """(tokens, blocks that must stay free) of a request that enters."""
        most = sequence.prompt + sequence.request.max_output_tokens
        tokens = min(sequence.known + self._config.reserve_tokens, most, self.ledger.total_tokens, sequence.limit)
        return tokens, self._headroom(sequence)

    def _headroom(self, sequence: Sequence) -> int:
        return int(self._config.kv_headroom * self.ledger.n_blocks) if sequence.is_long and self.holders else 0
