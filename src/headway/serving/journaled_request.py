"""What the journal is told of each request while it is served, and what it tells of those that were left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from headway.core.request import Slo
from headway.core.sampling import SamplingParams
from headway.runtime.engine.protocol import OutputDelta
from headway.serving.generation_job import GenerationJob, TextOptions
from headway.serving.journal import JournalEntry, RequestJournal
from headway.serving.prompts import TokenPrompt

Kind = Literal["completion", "chat"]


class _JournaledJob(msgspec.Struct, frozen=True):
    """A job without its prompts, as the journal has it."""

    kind: Kind
    model: str
    params: SamplingParams
    text: TextOptions
    slo: Slo
    priority: int
    timeout_s: float | None
    stream: bool
    include_usage: bool


@dataclass(slots=True)
class JournaledRequest:
    """One HTTP request's place in the journal. `said`: what was told to each prompt before a restart."""

    journal: RequestJournal
    number: int
    said: Sequence[Sequence[OutputDelta]] | None = None

    @classmethod
    def of(cls, journal: RequestJournal, request_id: str, kind: Kind, job: GenerationJob) -> JournaledRequest:
        """The request is accepted."""
        kept = _JournaledJob(
            kind, job.model, job.params, job.text, job.slo, job.priority, job.timeout_s, job.stream, job.include_usage
        )
        prompts = [prompt.data for prompt in job.prompts]
        return cls(journal, journal.accept(request_id, msgspec.msgpack.encode(kept), prompts))

    def before(self, index: int) -> Sequence[OutputDelta]:
        """What prompt `index` was told before a restart."""
        return self.said[index] if self.said is not None else ()

    @property
    def resumes(self) -> bool:
        """Whether an earlier server accepted it."""
        return self.said is not None

    def tell(self, index: int, delta: OutputDelta) -> None:
        """Before the client hears it."""
        self.journal.told(self.number, index, delta)

    def end(self) -> None:
        """The client has had its answer, or has left."""
        self.journal.end(self.number)


def job_of(entry: JournalEntry, now_s: float, unix_s: float) -> tuple[Kind, GenerationJob]:
    """The job of a request that an earlier server accepted. It queues from when it came; a time limit begins anew."""
    kept = msgspec.msgpack.decode(entry.accepted.job, type=_JournaledJob)
    age_s = max(0.0, unix_s - entry.accepted.at_s)
    job = GenerationJob(
        model=kept.model,
        prompts=tuple(TokenPrompt(memoryview(data), len(data) // 4) for data in entry.accepted.prompts),
        params=kept.params,
        text=kept.text,
        slo=kept.slo,
        priority=kept.priority,
        timeout_s=None if kept.timeout_s is None else kept.timeout_s + age_s,
        received_s=now_s - age_s,
        stream=kept.stream,
        include_usage=kept.include_usage,
    )
    return kept.kind, job
