"""Computation of one rank's share of a model: takes a batch, and returns tokens on the rank that samples.

A rank keeps its own copy of the block tables by replaying each batch's KV operations, so that no table is ever sent. A
single process is a rank that holds the whole model and has no links.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headway.core.batch import Chunk, DecodeGroup, GroupBatch, KvOp
from headway.core.errors import InvariantError
from headway.core.executor import EmittedToken
from headway.core.sampling import SamplingParams
from headway.kv.block_allocator import BlockTables, Run
from headway.runtime.attention.base import AttentionPlan, BatchSegment
from headway.runtime.attention.slots import cut_ranges
from headway.runtime.executor.group_attention import GroupAttention, RemoteQuery, RemoteRows
from headway.runtime.executor.plan_stream import QueryTargets
from headway.runtime.executor.rank_links import RankLinks
from headway.runtime.executor.request_tokens import RequestTokens, sampler_of
from headway.runtime.model.decoder import DecoderModel
from headway.runtime.model.rope import RotaryTable
from headway.runtime.model.sampling import sample

_OPERATORS = 8
"""Of a layer beside attention: two norms, four products, the rotation, the activation."""


class InterruptedChunk(NamedTuple):
    """A chunk whose first layers are computed, with KV in place: all state is in the pool and in `hidden`."""

    chunk: Chunk
    hidden: Tensor
    layers: int
    spent_s: float
    """Seconds that its layers have taken."""


class ModelWorker:
    """Holds the model, the KV pool and the tokens of the requests that were admitted."""

    def __init__(
        self,
        decoder: DecoderModel,
        kv_blocks: int,
        block_tokens: int,
        eos: tuple[int, ...],
        links: RankLinks | None = None,
    ) -> None:
        self.decoder = decoder
        self.pool = decoder.make_pool(kv_blocks * block_tokens)
        self.tables = BlockTables(kv_blocks)
        self.began_s = 0.0
        """When the last batch began to compute, by CLOCK_MONOTONIC: all of its inputs had arrived."""
        self.on_free: Callable[[str], None] = _ignore
        """Called with each request whose blocks are about to be freed."""
        shard = decoder.shard
        self._embeds, self._ends, self._draws = shard.first, shard.last, shard.last and shard.rank == 0
        self._links = links
        self._block = block_tokens
        config = decoder.config
        # A key costs a query row 4 flops a dimension in every layer; a row of a product 2 a weight.
        layer = decoder.weights.parameters / max(1, len(decoder.weights.layers))
        self._row_per_key = _OPERATORS * 2 * config.q_heads * config.head_dim / layer
        self._eos = eos
        self.earlier_s = 0.0
        """Seconds that layers of the last batch took before, in a batch that was interrupted."""
        self._interrupted: dict[str, InterruptedChunk] = {}
        self._residents: dict[str, RequestTokens] = {}
        self._slots: dict[str, tuple[Run, ...]] = {}
        self._bases: dict[str, int] = {}
        self._group: tuple[int, list[RequestTokens]] = (-1, [])
        self._rows: deque[Callable[[], Tensor]] = deque()
        self._drawn: deque[tuple[list[RequestTokens], Callable[[], list[int]]]] = deque()

    # -- requests -----------------------------------------------------------------------------------------------

    def admit(
        self,
        request_id: str,
        prompt_tokens: int,
        prompt: memoryview | bytes | None,
        params: SamplingParams | None,
        output: tuple[int, ...] = (),
    ) -> None:
        """Store the parts of a request that this rank needs. The prompt is not copied."""
        sampler = None
        if self._draws and params is not None:
            sampler = sampler_of(prompt, params, self.decoder.config.vocab_size, self._eos)
        resident = RequestTokens(prompt_tokens, prompt, sampler)
        for token in output:
            resident.count()
            resident.append(token)
        self._residents[request_id] = resident

    def forget(self, request_id: str) -> None:
        """Drop a request's tokens. Its KV is freed by an operation of the next batch."""
        self._residents.pop(request_id, None)

    def learn_tokens(self, request_id: str, known: int, tokens: tuple[int, ...]) -> None:
        """Append tokens of a request that other KV groups generated, behind its first `known` ones."""
        if self._embeds and not self._draws:
            # `learn` appends at the end: ids of tokens counted before must have arrived first.
            while self._residents[request_id].behind:
                self._receive_tokens()
        self._residents[request_id].learn(known, tokens)

    # -- block tables and cursors -------------------------------------------------------------------------------

    def replay(self, ops: tuple[KvOp, ...]) -> None:
        """Carry out a part's KV operations."""
        for op in ops:
            verb, request, start = op.verb, op.request, op.start
            if verb == "evict":
                self.tables.apply(op)
                continue
            if verb == "reassign":
                self.tables.apply(op)
                self._slots[request] = self._slots.pop(op.before)
                continue
            if verb == "free":
                # Before the blocks are free: a KV transfer may still read them.
                self.on_free(request)
                self.tables.apply(op)
                self._slots.pop(request, None)
                self._bases.pop(request, None)
                self._interrupted.pop(request, None)
                continue
            # Only the first operation of a shard names its first token.
            if start:
                self._bases[request] = start
            self.tables.apply(op)
            runs = self.tables.runs(request)
            if not runs:
                raise InvariantError(f"a KV operation gave {request} no blocks")
            self._slots[request] = self._slots_of(runs)

    def work_rows(self, part: GroupBatch) -> float:
        """Return a part's work in rows of the layers' other operators: its own, and its attention as of so many more.

        More threads pay where an operator is large, and attention is one."""
        keys = part.decodes.kv_sum + sum(chunk.tokens * chunk.start for chunk in part.prefills)
        return self.rows_of(part.tokens, keys)

    def rows_of(self, rows: int, keys: int) -> float:
        """Return the work of rows that see so many keys in all, in rows."""
        return rows + keys * self._row_per_key

    # -- computing ----------------------------------------------------------------------------------------------

    def expect(self, part: GroupBatch) -> None:
        """Post the receive of a part's rows from the stage before. Called once for each part, in order."""
        if not self._embeds and part.tokens:
            assert self._links is not None
            self._rows.append(self._links.expect_rows(part.tokens))

    @torch.inference_mode()
    def run(self, part: GroupBatch, query_targets: QueryTargets = ()) -> list[EmittedToken]:
        """Compute one part and sample its tokens: decodes in group order, then finished prompts.

        Returns nothing on ranks that do not sample. The part's KV operations have been replayed. query_targets: the
        requests whose rows other KV groups attend too.
        """
        emitted = self._run(part, query_targets)
        assert emitted is not None
        return emitted

    @torch.inference_mode()
    def run_until(self, part: GroupBatch, stop: Callable[[], bool]) -> list[EmittedToken] | None:
        """`run` a part that is one chunk, and return None where `stop`, asked between its layers, says so.

        A later part of the same chunk alone then goes on with the next layer."""
        return self._run(part, (), stop)

    def _run(
        self, part: GroupBatch, query_targets: QueryTargets, stop: Callable[[], bool] | None = None
    ) -> list[EmittedToken] | None:
        self.earlier_s = 0.0
        if not part.tokens:
            if part.assists:
                self._visit(part)
            return []
        # The same order everywhere: decodes first, then the prompts that end with this part.
        names = [*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)]
        decoding, yielding = self._members(part.decodes), self._yielding(part)
        segments, positions, wanted = self._layout(part, decoding)
        before = self._take_interrupted(part)
        hidden = self._begin(part, decoding) if before is None else before.hidden
        plan = self._plan(part, segments, query_targets)
        rotary, first = self.decoder.rotary_table(positions), 0 if before is None else before.layers
        if stop is not None:
            to_last = self._run_to_last(part.prefills[0], hidden, rotary, plan, first, stop)
            if to_last is None:
                return None
            first = to_last
        hidden = self.decoder.run_layers(hidden, rotary, plan, first)
        if not self._ends:
            assert self._links is not None
            self._links.send_rows(hidden)
        emitted: list[EmittedToken] = []
        if self._draws:
            self._score_prompts(part, hidden)
        if wanted and self._ends:
            # The head is the largest matrix: only rows that yield a token are multiplied, and a batch of decodes is not
            # copied.
            whole = len(wanted) == hidden.shape[0]
            logits = self.decoder.head(
                hidden if whole else hidden.index_select(0, torch.tensor(wanted, device=hidden.device))
            )
            if logits is not None:
                emitted = self._draw(names, yielding, logits)
        # Counted at once, so that the next batch can be laid out before the token's id has arrived.
        for resident in yielding:
            resident.count()
        if wanted and self._embeds and not self._draws:
            assert self._links is not None
            # The receive is posted now and completed by `_receive_tokens`, when a later batch embeds the token.
            self._drawn.append((yielding, self._links.expect_tokens(len(yielding))))
        return emitted

    def _take_interrupted(self, part: GroupBatch) -> InterruptedChunk | None:
        """Return what is computed of a part that is one interrupted chunk. Of other chunks of its request none is."""
        if not self._interrupted:
            return None
        found = [self._interrupted.pop(chunk.request, None) for chunk in part.prefills]
        if part.tokens != sum(chunk.tokens for chunk in part.prefills) or len(found) != 1:
            return None
        before = found[0]
        if before is None or before.chunk != part.prefills[0]:
            return None
        self.earlier_s = before.spent_s
        return before

    def _run_to_last(
        self,
        chunk: Chunk,
        hidden: Tensor,
        rotary: RotaryTable,
        plan: AttentionPlan,
        first: int,
        stop: Callable[[], bool],
    ) -> int | None:
        """Run the layers from `first` to the last, and return that, which is still to run. None: `stop` interrupted."""
        began_s, last = time.monotonic(), self.pool.layers - 1
        for layer in range(first, last):
            self.decoder.run_layers(hidden, rotary, plan, layer, layer + 1)
            if stop():
                spent_s = self.earlier_s + time.monotonic() - began_s
                self._interrupted[chunk.request] = InterruptedChunk(chunk, hidden, layer + 1, spent_s)
                return None
        return last

    def _score_prompts(self, part: GroupBatch, hidden: Tensor) -> None:
        """Score the chunks of requests that ask for their prompt's log-probabilities."""
        at = part.decodes.count
        for chunk in part.prefills:
            resident = self._residents[chunk.request]
            if resident.scores is not None:
                resident.scores.add(chunk.start, hidden[at : at + chunk.tokens], resident.tokens, self._logits)
            at += chunk.tokens

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.decoder.head(hidden)
        assert logits is not None
        return logits

    def _layout(self, part: GroupBatch, decoding: list[RequestTokens]) -> tuple[list[BatchSegment], Tensor, list[int]]:
        """Rows of the forward pass: decodes first, then chunks. (segments, positions, rows that yield a token)."""
        # A decode computes the newest known token, whose KV is not stored yet.
        positions = [resident.known - 1 for resident in decoding]
        segments = [
            # `past` counts slots of this group's shard, not tokens of the request.
            BatchSegment(row, 1, position - self._base(name), self._slots[name])
            for row, (name, position) in enumerate(zip(part.decodes.members, positions, strict=True))
        ]
        wanted = list(range(len(positions)))
        at = len(positions)
        places = [torch.tensor(positions, dtype=torch.int64)] if positions else []
        for chunk in part.prefills:
            places.append(torch.arange(chunk.start, chunk.start + chunk.tokens))
            segments.append(BatchSegment(at, chunk.tokens, chunk.start - chunk.base, self._slots[chunk.request]))
            at += chunk.tokens
            if chunk.last:
                wanted.append(at - 1)
        return segments, places[0] if len(places) == 1 else torch.cat(places), wanted

    def _plan(self, part: GroupBatch, segments: list[BatchSegment], query_targets: QueryTargets) -> AttentionPlan:
        """Return the attention plan of a part, together with other KV groups for requests that lie in several."""
        backend = self.decoder.backend
        if not (query_targets or part.assists):
            return backend.plan(segments, self.pool)
        assert isinstance(backend, GroupAttention)
        names = (*part.decodes.members, *(chunk.request for chunk in part.prefills))
        rows = dict(zip(names, segments, strict=True))
        asked = [RemoteQuery(group, tuple(rows[name] for name in requests)) for group, requests in query_targets]
        return backend.share(segments, self.pool, asked, self._visits(part))

    def _visits(self, part: GroupBatch) -> list[RemoteRows]:
        return [RemoteRows(a.owner, a.rows, cut_ranges(self._slots[a.request], 0, a.tokens)) for a in part.assists]

    def _visit(self, part: GroupBatch) -> None:
        """Attend rows of other groups, in a part without rows of its own."""
        backend = self.decoder.backend
        assert isinstance(backend, GroupAttention)
        plan = backend.share((), self.pool, (), self._visits(part))
        for layer in range(self.pool.layers):
            backend.answer_queries(layer, plan)
        self.began_s = plan.began_s

    def _base(self, request_id: str) -> int:
        """Return the first token of a request that is held here."""
        return self._bases.get(request_id, 0)

    def _begin(self, part: GroupBatch, decoding: list[RequestTokens]) -> Tensor:
        """Return the rows that enter this rank's first layer: embedded tokens, or those sent by the stage before."""
        if not self._embeds:
            hidden = self._rows.popleft()()
            self.began_s = time.monotonic()
            return hidden
        prompts = [(chunk, self._residents[chunk.request]) for chunk in part.prefills]
        for resident in (*decoding, *(resident for _, resident in prompts)):
            while resident.behind:
                self._receive_tokens()
        self.began_s = time.monotonic()
        pieces = [torch.tensor([resident.last for resident in decoding], dtype=torch.int64)] if decoding else []
        pieces += [resident.tokens(chunk.start, chunk.tokens) for chunk, resident in prompts]
        return self.decoder.embed(pieces[0] if len(pieces) == 1 else torch.cat(pieces))

    def _receive_tokens(self) -> None:
        """Wait for the oldest tokens that another rank sampled, and append them."""
        if not self._drawn:
            raise InvariantError("a request waits for a token that is not being sampled")
        residents, wait = self._drawn.popleft()
        for resident, token in zip(residents, wait(), strict=True):
            resident.append(token)

    def _draw(self, names: list[str], residents: list[RequestTokens], logits: Tensor) -> list[EmittedToken]:
        # A request that was aborted while its batch was in flight is still computed; its token is dropped.
        samplers = [resident.sampler for resident in residents]
        drawn = sample(logits, [s for s in samplers if s is not None], [resident.known for resident in residents])
        if self._links is not None:
            # First to the other ranks: the first stage waits for these ids to begin its next batch.
            self._links.send_tokens([result.token for result in drawn])
        for resident, result in zip(residents, drawn, strict=True):
            resident.append(result.token)
        return [
            EmittedToken(name, result.token, result.logprobs, None if one.scores is None else one.scores.report())
            for name, one, result in zip(names, residents, drawn, strict=True)
        ]

    def _members(self, group: DecodeGroup) -> list[RequestTokens]:
        if group.epoch != self._group[0]:
            self._group = (group.epoch, [self._residents[name] for name in group.members])
        return self._group[1]

    def _yielding(self, part: GroupBatch) -> list[RequestTokens]:
        last: list[Chunk] = [chunk for chunk in part.prefills if chunk.last]
        return [*self._members(part.decodes), *(self._residents[chunk.request] for chunk in last)]

    def _slots_of(self, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        return tuple((first * self._block, count * self._block) for first, count in runs)


def _ignore(request: str) -> None:
    """The default of `ModelWorker.on_free`."""
