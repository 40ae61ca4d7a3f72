"""Computation of one rank's share of a model: a batch in, tokens out on the rank that samples. Requests' tokens, scores
of prompts, copies of KV blocks, and attention over several KV groups belong to it.

A rank keeps its own copy of the block tables by replaying each batch's KV operations, so that no table is ever sent. A
single process is a rank that holds the whole model and has no links.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from headway.core.batch import Chunk, DecodeGroup, EmittedToken, GroupBatch, KvOp
from headway.core.errors import InvariantError
from headway.core.request import SamplingParams, TokenLogprobs
from headway.kv.allocator import BlockTables, Run, cut_ranges
from headway.runtime.attention.backend import (
    AttentionBackend,
    AttentionPlan,
    BatchSegment,
    PartialAttention,
    PartialRead,
    merge,
)
from headway.runtime.attention.kv_pool import KvPool
from headway.runtime.executor.plans import QueryTargets
from headway.runtime.model.decoder import DecoderModel, TensorGroup
from headway.runtime.model.sampling import SamplerState, make_state, sample, score

_ROWS = 64
"""Rows whose logits exist at one time: 64 rows of a vocabulary of 128K take 32 MiB."""


class PromptScores:
    """Scores of one request's prompt. A chunk that is computed again replaces its scores.

    count: alternatives for each token; prompt_tokens: length of the prompt.
    """

    def __init__(self, count: int, prompt_tokens: int) -> None:
        self._count = count
        self._prompt_tokens = prompt_tokens
        # By the position of the token that is scored; the first token has no score.
        self._scores: dict[int, TokenLogprobs] = {}
        self._reported = False

    def add(
        self, start: int, hidden: Tensor, tokens: Callable[[int, int], Tensor], head: Callable[[Tensor], Tensor]
    ) -> None:
        """Score the tokens that follow the rows of a chunk.

        hidden: (R, hidden) after the last layer, of positions [start, start + R); tokens: ids of a range of positions;
        head: rows to logits (R, vocab).
        """
        stop = min(start + hidden.shape[0], self._prompt_tokens - 1)
        for first in range(start, stop, _ROWS):
            rows = min(_ROWS, stop - first)
            logits = head(hidden[first - start : first - start + rows])
            found = score(logits, tokens(first + 1, rows).to(logits.device), self._count)
            self._scores.update(enumerate(found, first + 1))

    def report(self) -> tuple[TokenLogprobs, ...] | None:
        """Return the scores of tokens 1, 2, … of the prompt, the first time; None afterwards.

        Raises KeyError when a part of the prompt was not computed here.
        """
        if self._reported:
            return None
        self._reported = True
        return tuple(self._scores.pop(position) for position in range(1, self._prompt_tokens))


class RequestTokens:
    """A request's token state on one rank.

    Ids are kept only on ranks that embed or sample, and may arrive after they are counted: `count` is called with the
    plan, `append` with the token.
    """

    __slots__ = ("_prompt", "_prompt_tokens", "known", "last", "output", "sampler", "scores")

    def __init__(self, prompt_tokens: int, prompt: memoryview | bytes | None, sampler: SamplerState | None) -> None:
        self._prompt = None if prompt is None else np.frombuffer(prompt, dtype=np.int32)
        self._prompt_tokens = prompt_tokens
        self.known = prompt_tokens
        """Prompt and generated tokens, including those whose ids have not arrived."""
        self.output: list[int] = []
        self.last = -1 if self._prompt is None else int(self._prompt[-1])
        """The newest id; -1 where this rank keeps none."""
        self.sampler = sampler
        """Set on the rank that samples only."""
        self.scores: PromptScores | None = None
        """Log-probabilities of the prompt, if the request asks for them."""
        if sampler is not None and sampler.params.prompt_logprobs is not None:
            self.scores = PromptScores(sampler.params.prompt_logprobs, prompt_tokens)

    @property
    def behind(self) -> bool:
        """Whether tokens have been counted whose ids have not arrived."""
        return self._prompt_tokens + len(self.output) < self.known

    def count(self) -> None:
        """Count one more token. Its id arrives later, or never on ranks that do not need it."""
        self.known += 1

    def append(self, token: int) -> None:
        """Append the id of the oldest token that was counted without one."""
        self.output.append(token)
        self.last = token
        if self.sampler is not None:
            self.sampler.append(token)

    def learn(self, known: int, tokens: tuple[int, ...]) -> None:
        """Append tokens generated in another group or instance, behind the first `known`. Those held are skipped."""
        self.known = max(self.known, known + len(tokens))
        if self._prompt is not None or self.sampler is not None:
            for token in tokens[self._prompt_tokens + len(self.output) - known :]:
                self.append(token)

    def tokens(self, start: int, count: int) -> Tensor:
        """Return tokens [start, start + count) of prompt and output as int64."""
        if self._prompt is None:
            raise InvariantError("this rank keeps no prompts")
        stop = start + count
        size = self._prompt_tokens
        parts = []
        if start < size:
            parts.append(self._prompt[start : min(stop, size)].astype(np.int64))
        if stop > size:
            parts.append(np.array(self.output[max(start, size) - size : stop - size], dtype=np.int64))
        return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))


def sampler_of(
    prompt: memoryview | bytes | None, params: SamplingParams, vocab_size: int, eos: tuple[int, ...]
) -> SamplerState:
    """Make a request's sampler. Only a repetition penalty reads the prompt."""
    ids = np.empty(0, dtype=np.int32) if prompt is None else np.frombuffer(prompt, dtype=np.int32)
    return make_state(params, ids, vocab_size, eos)


# Interface of communication between ranks while they compute. Live: `gloo_links.GlooLinks`; in tests: threads.
#
# Sums and gathers are collective; everything else is point to point and asynchronous: sends do not block, and receives
# are posted before their data is needed. Messages between two ranks arrive in the order of sending.


class PeerLinks(Protocol):
    """One rank's connections with the ranks of the same place in other KV groups."""

    def expect_from(self, group: int, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Post the receive of that group's next message; the returned function waits for it.

        Every message is received once, in the order of sending.
        """

    def send_to(self, group: int, x: Tensor) -> None:
        """Send to that group's rank. `x` is contiguous and must not change afterwards."""


class RankLinks(TensorGroup, PeerLinks, Protocol):
    """One rank's connections."""

    def expect_rows(self, rows: int) -> Callable[[], Tensor]:
        """Post the receive of the previous stage's next (rows, hidden); the returned function waits for it."""

    def send_rows(self, hidden: Tensor) -> None:
        """Send (rows, hidden) to the next stage. `hidden` must not change afterwards."""

    def expect_tokens(self, count: int) -> Callable[[], list[int]]:
        """Post the receive of the next `count` sampled tokens; the returned function waits for them."""

    def send_tokens(self, tokens: list[int]) -> None:
        """Send sampled tokens to all ranks that embed. Called by the rank that samples."""

    def close(self) -> None:
        """Release the connections. No other method is called afterwards."""


# Attention of one rank over requests whose keys lie in several KV groups (KVP, Medha §3.3).
#
# A request's rows are computed in one group, their owner. In each layer the owner sends their queries to every other
# group that holds a shard of the request; each such group attends them over its shard, without mask because all of the
# shard is before the rows, and returns a partial answer in fp32; the owner merges these with its own by log-sum-exp. A
# group may own some requests of a batch and hold remote shards of others, also of a group that holds a shard for it.
#
# Freedom from deadlock. Each layer has three steps on every rank of a batch, always in this order: (1) send own
# queries, (2) attend foreign queries and send the answers, (3) receive the answers to own queries. Sends never block. A
# wait in step 2 is for a message of another rank's step 1 in the same batch, stage and layer; a wait in step 3 for one
# of step 2. Sums over tensor-parallel ranks come between steps 3 and 1 of the next layer, and rows from the stage
# before come before layer 0. So every wait is for a step that comes earlier in the order (batch, stage, layer, step),
# and all ranks proceed in that order: every group carries out its batches in the order in which the engine made them.
# The least step that is waited for can therefore always be taken. Messages between two ranks keep their order and need
# no labels.


class RemoteQuery(NamedTuple):
    """Rows of this batch that group `group` attends as well, in the order in which it expects them."""

    group: int
    segments: tuple[BatchSegment, ...]


class RemoteRows(NamedTuple):
    """Rows of another group's request, to be attended over this group's shard."""

    owner: int
    """The group that computes the rows."""
    rows: int
    slot_ranges: list[tuple[int, int]]
    """Slot ranges of the shard."""


class _OwnerRows:
    """Rows attended for one owner group: all queries arrive in one message, all answers leave in one."""

    def __init__(self, owner: int, remote_rows: Sequence[RemoteRows], pool: KvPool) -> None:
        self.owner = owner
        readings = []
        at = 0
        for remote in remote_rows:
            # Not causal: every token of a remote shard lies before all of the owner's rows.
            readings.append(PartialRead(at, remote.rows, remote.slot_ranges, False))
            at += remote.rows
        self.rows = at
        self.partials = PartialAttention(readings, pool)


class SharedPlan:
    """One iteration of one rank.

    own: the plan of its own rows, which stores all of them and attends those that are not shared. own_partials: partial
    attention of its shared rows over its own shard.
    """

    def __init__(
        self,
        rows: int,
        pool: KvPool,
        own: AttentionPlan | None,
        own_partials: PartialAttention | None,
        remote_queries: Sequence[RemoteQuery],
        owners: Sequence[_OwnerRows],
    ) -> None:
        self.rows, self.pool = rows, pool
        self.own, self.own_partials = own, own_partials
        self.owners = owners
        self.began_s = 0.0
        """When the first queries of another group had arrived: the start of the work of a rank without own rows."""
        self.queries: list[Callable[[], Tensor]] = []
        self.answers: list[Callable[[], Tensor]] = []
        device = pool.data.device
        self.sent = [
            (
                remote_query.group,
                torch.cat([torch.arange(s.start, s.start + s.tokens) for s in remote_query.segments]).to(device),
            )
            for remote_query in remote_queries
        ]
        """(group, rows of the batch)."""
        where: dict[int, tuple[BatchSegment, list[tuple[int, int]]]] = {}
        for index, remote_query in enumerate(remote_queries):
            at = 0
            for segment in remote_query.segments:
                where.setdefault(segment.start, (segment, []))[1].append((index, at))
                at += segment.tokens
        self.merges = list(where.values())
        """(segment, where its rows are in the answers: (index of the group in `sent`, first row))."""


class GroupAttention(AttentionBackend):
    """`AttentionBackend` around another, for a rank of one of several KV groups. `q_heads`: this rank's."""

    def __init__(self, inner: AttentionBackend, links: PeerLinks, q_heads: int) -> None:
        self.inner = inner
        self._links = links
        self._q_heads = q_heads

    @override
    def plan(self, segments: Sequence[BatchSegment], pool: KvPool) -> AttentionPlan:
        """For requests that lie in this group only."""
        return self.inner.plan(segments, pool)

    def share(
        self,
        segments: Sequence[BatchSegment],
        pool: KvPool,
        remote_queries: Sequence[RemoteQuery],
        remote_rows: Sequence[RemoteRows],
    ) -> SharedPlan:
        """Plan an iteration in which other groups attend some of these rows, or this group attends some of theirs.

        Of segments in `remote_queries`, `past` counts the tokens that this group holds. Without segments, only
        `answer_queries` is called.
        """
        shared = {segment.start for remote_query in remote_queries for segment in remote_query.segments}
        own = own_partials = None
        rows = 0
        if segments:
            rows = segments[-1].start + segments[-1].tokens
            own = self.inner.plan([s._replace(shared=s.start in shared) for s in segments], pool)
        if shared:
            chosen = [s for s in segments if s.start in shared]
            readings = [
                PartialRead(s.start, s.tokens, cut_ranges(s.slot_ranges, 0, s.past + s.tokens), True) for s in chosen
            ]
            own_partials = PartialAttention(readings, pool)
        owners = [
            _OwnerRows(owner, [remote for remote in remote_rows if remote.owner == owner], pool)
            for owner in sorted({remote.owner for remote in remote_rows})
        ]
        plan = SharedPlan(rows, pool, own, own_partials, remote_queries, owners)
        # Receives of layer 0 are posted at planning, those of layer i + 1 at the start of layer i's visits.
        self._expect(plan, 0)
        return plan

    @override
    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        if not isinstance(plan, SharedPlan):
            return self.inner.run(layer, q, k, v, plan)
        assert plan.own is not None
        # Step 1, before own attention, which then overlaps with that of the remote groups.
        for group, rows in plan.sent:
            self._links.send_to(group, q.index_select(0, rows))
        out = self.inner.run(layer, q, k, v, plan.own)
        own_partials = None if plan.own_partials is None else plan.own_partials.partial(layer, q)
        answers = self.answer_queries(layer, plan)
        if own_partials is not None:
            received = [wait() for wait in answers]
            for segment, places in plan.merges:
                rows_here = slice(segment.start, segment.start + segment.tokens)
                # An answer has d + 1 columns: the partial output, and its log-sum-exp in the last.
                remote = [received[index][at : at + segment.tokens] for index, at in places]
                outs = [own_partials[0][rows_here], *(answer[..., :-1] for answer in remote)]
                lses = [own_partials[1][rows_here], *(answer[..., -1] for answer in remote)]
                out[rows_here] = merge(outs, lses)[0]
        return out

    def answer_queries(self, layer: int, plan: SharedPlan) -> list[Callable[[], Tensor]]:
        """Attend rows of other groups and send the answers. Returns the waits for answers to own queries."""
        # Take this layer's receives before `_expect` replaces them by the next layer's.
        queries, answers = plan.queries, plan.answers
        self._expect(plan, layer + 1)
        for owner, wait in zip(plan.owners, queries, strict=True):
            query = wait()
            plan.began_s = plan.began_s or time.monotonic()
            out, lse = owner.partials.partial(layer, query)
            self._links.send_to(owner.owner, torch.cat((out, lse.unsqueeze(-1)), dim=-1))
        return answers

    def _expect(self, plan: SharedPlan, layer: int) -> None:
        """Post the receives of a layer's messages, one layer ahead, so that they are received as soon as sent."""
        plan.queries, plan.answers = [], []
        pool = plan.pool
        if layer == pool.layers:
            return
        heads, dim, links = self._q_heads, pool.head_dim, self._links
        for owner in plan.owners:
            plan.queries.append(links.expect_from(owner.owner, (owner.rows, heads, dim), pool.dtype))
        for group, rows in plan.sent:
            plan.answers.append(links.expect_from(group, (len(rows), heads, dim + 1), torch.float32))


_OPERATORS = 8
"""Operations of a layer beside attention: two norms, four products, the rotation, the activation."""


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
        if not part.tokens:
            if part.assists:
                self._visit(part)
            return []
        # The same order everywhere: decodes first, then the prompts that end with this part.
        names = [*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)]
        decoding, yielding = self._members(part.decodes), self._yielding(part)
        segments, positions, wanted = self._layout(part, decoding)
        hidden = self._begin(part, decoding)
        plan = self._plan(part, segments, query_targets)
        hidden = self.decoder.run_layers(hidden, self.decoder.rotary_table(positions), plan)
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
