"""An executor whose model is a function: the next token follows from the prompt's sum and the position alone.

It keeps block tables by replaying, insists on every contract that a real one relies on (tokens in order, each once a
life, inside the request's blocks, nothing after `forget`), and answers batches in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from headway.core.batch import Batch, EmittedToken, StepResult
from headway.core.errors import LostError
from headway.core.request import SamplingParams
from headway.kv.allocator import BlockTables

VOCAB = 1000


def next_token(total: int, position: int) -> int:
    """The fake model: 3..VOCAB-1, so that 0..2 are free to be end tokens."""
    return 3 + (total * 7919 + position * 104_729) % (VOCAB - 3)


def answer(prompt: list[int], tokens: int) -> list[int]:
    """What the fake model says to a prompt."""
    return [next_token(sum(prompt), len(prompt) + i) for i in range(tokens)]


@dataclass
class Resident:
    total: int
    prompt_tokens: int
    script: dict[int, int]
    computed: int = 0
    known: int = 0
    told: int = 0


@dataclass
class FakeExecutor:
    """`script` (request → {position in the output: token}) overrules the model, e.g. with end tokens.

    Each batch takes `step_s` by its own word. With `hold`, results come only as `release` allows. `lose`: the next
    result is this loss; while not `recovers`, its restart does not end."""

    blocks: int = 64
    block_tokens: int = 16
    step_s: float = 0.01
    hold: bool = False
    script: dict[str, dict[int, int]] = field(default_factory=dict)
    residents: dict[str, Resident] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    closed: int = 0
    lose: str | None = None
    recovers: bool = True

    def __post_init__(self) -> None:
        self.tables = BlockTables(self.blocks)
        self._done: deque[StepResult] = deque()
        self.released = 0

    waits_on: tuple[object, ...] = ()
    accepts: bool = True
    free: tuple[int, ...] | None = None

    def admit(
        self, request_id: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...] = (),
        kept: bool = False,
    ) -> None:  # fmt: skip
        assert request_id not in self.residents
        ids = np.frombuffer(prompt, dtype=np.int32)
        total, size = int(ids.sum(dtype=np.int64)), int(ids.size)
        script = self.script.get(request_id, {})
        assert list(output) == [script.get(i, next_token(total, size + i)) for i in range(len(output))]
        self.residents[request_id] = Resident(total, size, script, 0, size + len(output), len(output))

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)
        part = batch.parts[0]
        for op in part.kv_ops:
            if op.verb == "free":
                self.tables.free(op.request)
                if op.request in self.residents:
                    self.residents[op.request].computed = 0
            else:
                self.tables.add(op.request, op.blocks)
        emitted = []
        for name in part.decodes.members:
            resident = self.residents[name]
            assert resident.computed == resident.known - 1
            emitted.append(self._compute(name, 1))
        for chunk in part.prefills:
            assert chunk.start == self.residents[chunk.request].computed
            token = self._compute(chunk.request, chunk.tokens, last=chunk.last)
            emitted += [token] if chunk.last else []
        self._done.append(StepResult(batch.id, emitted, self.step_s))

    def _compute(self, name: str, tokens: int, last: bool = True) -> EmittedToken:
        resident = self.residents[name]
        resident.computed += tokens
        assert resident.computed <= sum(count for _, count in self.tables.runs(name)) * self.block_tokens
        assert last == (resident.computed == resident.known)
        token = next_token(resident.total, resident.known)
        token = resident.script.get(resident.known - resident.prompt_tokens, token)
        resident.known += last
        return EmittedToken(name, token, None)

    def result(self, timeout_s: float | None) -> StepResult | None:
        if self.lose is not None:
            self.accepts, lost, self.lose = False, self.lose, None
            raise LostError(lost)
        self.accepts = self.accepts or self.recovers
        if self.hold and not self.released:
            return None
        self.released -= self.hold
        done = self._done.popleft() if self._done else None
        for emitted in [] if done is None else done.emitted:
            if emitted.request in self.residents:
                self.residents[emitted.request].told += 1
        return done

    def recover(self) -> None:
        """All KV is gone, and all in flight; the restart takes until `result` is called again, and `recovers`."""
        assert not self.accepts
        self._done.clear()
        self.tables = BlockTables(self.blocks)
        for resident in self.residents.values():
            resident.computed, resident.known = 0, resident.prompt_tokens + resident.told

    def forget(self, request_id: str) -> None:
        del self.residents[request_id]
        self.forgotten.append(request_id)

    def close(self) -> None:
        self.closed += 1
