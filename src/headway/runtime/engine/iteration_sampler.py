"""Samples of an engine's iterations for the live page: bounded in number whatever the rate of iterations.

Fed with the events of the engine's event log (`core.event_log`), in place of a log or beside one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from msgspec.structs import replace

from headway.core.event_log import EventSink
from headway.policy.iteration.base import InstanceScheduler
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.grouped_scheduler import group_policies
from headway.runtime.engine.protocol import ChunkSample, EngineSamples, IterationSample, WaitingSample
from headway.sim.replayed_run import limit_of_chunk

MOST_SAMPLES = 64
"""Samples between two messages to the server (0.1 s); iterations beyond that are added to the last ones."""
MOST_WAITING = 64
MOST_CHUNKS = 8
"""Chunks of one sample; further ones are left out."""
_JOINED_S = 0.02
"""Iterations of decodes only in a row become one sample of up to this length."""
_CLOSE_S = 0.002
"""Longest time between two iterations of one sample."""


class IterationSampler:
    """Collects samples between two calls of `take`."""

    def __init__(self, scheduler: InstanceScheduler) -> None:
        self._scheduler = scheduler
        self._policies = group_policies(scheduler)
        # By batch in flight: when it was decided.
        self._decided: dict[int, float] = {}
        self._samples: list[IterationSample] = []
        # Place in `_samples` of the newest of each (group, stage).
        self._newest: dict[tuple[int, int], int] = {}

    def beside(self, log: EventSink | None) -> EventSink:
        """Return a sink for this sampler and a log, if there is one."""

        def write(kind: str, fields: dict[str, object]) -> None:
            if log is not None:
                log(kind, fields)
            self.note(kind, fields)

        return write

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Take in an event of the log."""
        if kind == "schedule":
            self._decided[fields["id"]] = fields["at_s"]
        elif kind == "batch":
            self._batch(fields)
        elif kind == "interrupt":
            del self._decided[fields["id"]]
        elif kind == "lost":
            self._decided.clear()

    def take(self) -> EngineSamples:
        """Return what was collected since the last call."""
        taken = EngineSamples(tuple(self._samples), tuple(self._waiting()))
        self._samples, self._newest = [], {}
        return taken

    def _waiting(self) -> list[WaitingSample]:
        return [
            WaitingSample(state.request.id, state.deadline_s, state.work_s, state.scheduled, state.known)
            for policy in self._policies
            for state in islice(policy.queue, MOST_WAITING)
        ][:MOST_WAITING]

    def _batch(self, event: Mapping[str, Any]) -> None:
        decided_s = self._decided.pop(event["id"], event["at_s"])
        for group, decodes, chunks, stages in event["parts"]:
            rows = decodes + sum(tokens for _, _, tokens in chunks)
            policy = self._policies[group] if group < len(self._policies) else None
            sampled = tuple(_chunk(policy, rows, len(self._policies) > 1, chunk) for chunk in chunks[:MOST_CHUNKS])
            for stage, (start_s, end_s) in enumerate(stages):
                # The end as requests see it: tokens are stamped with the batch's time.
                until_s = event["at_s"] if stage == len(stages) - 1 else end_s
                self._add(
                    IterationSample(group, stage, decided_s, start_s, until_s, event["predicted_s"], decodes, sampled)
                )

    def _add(self, sample: IterationSample) -> None:
        key = (sample.group, sample.stage)
        place = self._newest.get(key)
        if place is not None:
            last = self._samples[place]
            plain = not (last.chunks or sample.chunks) and sample.start_s - last.end_s < _CLOSE_S
            if (plain and sample.end_s - last.start_s < _JOINED_S) or len(self._samples) >= MOST_SAMPLES:
                self._samples[place] = _joined(last, sample)
                return
        self._newest[key] = len(self._samples)
        self._samples.append(sample)


def _chunk(policy: IterationPolicy | None, rows: int, sharded: bool, chunk: tuple[str, int, int]) -> ChunkSample:
    """Return the sample of a chunk (request, first token, tokens), after its iteration."""
    name, start, tokens = chunk
    state = None if policy is None else policy.holders.get(name)
    # Ended or decoding by now: it was the last chunk.
    remaining = tokens if state is None or state.decoding else max(tokens, state.known - start)
    limit = "rest of the prompt"
    if policy is not None and state is not None:
        limit = limit_of_chunk(policy.config, tokens, remaining, rows, sharded)
    return ChunkSample(name, start, tokens, remaining, limit)


def _joined(first: IterationSample, second: IterationSample) -> IterationSample:
    """Return two samples as one; chunks of one request are added up."""
    chunks = {chunk.request: chunk for chunk in first.chunks}
    for chunk in second.chunks:
        before = chunks.get(chunk.request)
        chunks[chunk.request] = chunk if before is None else replace(before, tokens=before.tokens + chunk.tokens)
    return replace(
        first,
        end_s=max(first.end_s, second.end_s),
        predicted_s=first.predicted_s + second.predicted_s,
        decodes=max(first.decodes, second.decodes),
        chunks=tuple(chunks.values())[:MOST_CHUNKS],
        iterations=first.iterations + second.iterations,
    )
