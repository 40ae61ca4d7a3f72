"""One model replica on one device: a batch in, sampled tokens out.

It keeps its own copy of the block tables by replaying each batch's KV operations, so that nobody sends it a table.
"""

from __future__ import annotations

import torch

from headway.attention.base import Segment
from headway.core.batch import Batch, DecodeGroup, KvOp
from headway.core.errors import InvariantError
from headway.core.executor import Emitted
from headway.core.sampling import SamplingParams
from headway.kv.allocator import BlockTables, Run
from headway.model.decoder import Decoder
from headway.model.sampling import sample
from headway.worker.resident import Resident


class Worker:
    """Holds the model, the KV pool and the tokens of the requests that were admitted."""

    def __init__(self, decoder: Decoder, kv_blocks: int, block_tokens: int, eos: tuple[int, ...]) -> None:
        self.decoder = decoder
        self.pool = decoder.make_pool(kv_blocks * block_tokens)
        self._block = block_tokens
        self._tables = BlockTables(kv_blocks)
        self._eos = eos
        self._residents: dict[str, Resident] = {}
        self._slots: dict[str, tuple[Run, ...]] = {}
        self._group: tuple[int, list[Resident]] = (-1, [])

    def admit(self, request_id: str, prompt: memoryview, params: SamplingParams) -> None:
        """Keep a request's prompt; costs what making its sampler costs, and no copy of the prompt."""
        self._residents[request_id] = Resident(prompt, params, self.decoder.config.vocab_size, self._eos)

    def forget(self, request_id: str) -> None:
        """Drop a request's tokens; its KV goes with the next batch's `free`."""
        self._residents.pop(request_id, None)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[Emitted]:
        """Run one iteration and draw the tokens that it yields: decodes in group order, then finished prompts."""
        part = batch.parts[0]
        self._replay(part.kv_ops)
        decoding = self._members(part.decodes)
        rows: list[int] = [resident.last for resident in decoding]
        positions: list[int] = [resident.known - 1 for resident in decoding]
        segments = [
            Segment(row, 1, position, self._slots[name])
            for row, (name, position) in enumerate(zip(part.decodes.members, positions, strict=True))
        ]
        pieces = [torch.tensor(rows, dtype=torch.int64)] if rows else []
        places = [torch.tensor(positions, dtype=torch.int64)] if rows else []
        wanted = list(range(len(rows)))
        names = list(part.decodes.members)
        at = len(rows)
        for chunk in part.prefills:
            pieces.append(self._residents[chunk.request].tokens(chunk.start, chunk.tokens))
            places.append(torch.arange(chunk.start, chunk.start + chunk.tokens))
            segments.append(Segment(at, chunk.tokens, chunk.start, self._slots[chunk.request]))
            at += chunk.tokens
            if chunk.last:
                wanted.append(at - 1)
                names.append(chunk.request)
        tokens = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        position = places[0] if len(places) == 1 else torch.cat(places)
        plan = self.decoder.backend.plan(segments, self.pool)
        if not wanted:
            self.decoder.run_layers(self.decoder.embed(tokens), self.decoder.rotary_table(position), plan)
            return []
        logit_rows = None if len(wanted) == at else torch.tensor(wanted, dtype=torch.int64)
        logits = self.decoder.forward(tokens, position, plan, logit_rows)
        return self._draw(names, logits)

    def _draw(self, names: list[str], logits: torch.Tensor) -> list[Emitted]:
        # A request that was aborted while its batch waited is still computed; its token goes nowhere.
        residents = [self._residents[name] for name in names]
        drawn = sample(logits, [r.sampler for r in residents], [r.known for r in residents])
        emitted = []
        for name, resident, result in zip(names, residents, drawn, strict=True):
            resident.append(result.token)
            emitted.append(Emitted(name, result.token, result.logprobs))
        return emitted

    def _members(self, group: DecodeGroup) -> list[Resident]:
        if group.epoch != self._group[0]:
            self._group = (group.epoch, [self._residents[name] for name in group.members])
        return self._group[1]

    def _replay(self, ops: tuple[KvOp, ...]) -> None:
        for verb, request, blocks in ((op.verb, op.request, op.blocks) for op in ops):
            if verb == "free":
                self._tables.free(request)
                self._slots.pop(request, None)
                continue
            self._tables.add(request, blocks)
            runs = tuple((first * self._block, count * self._block) for first, count in self._tables.runs(request))
            if sum(count for _, count in runs) == 0:
                raise InvariantError(f"a KV operation gave {request} no blocks")
            self._slots[request] = runs
