"""What the journal is told of each request while it is served, and what it tells of those that were left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from headway.core.request import Slo
from headway.core.sampling import SamplingParams
from headway.runtime.engine.protocol import Delta
from headway.serving.generation_job import Job, TextOptions
from headway.serving.journal import Entry, Journal
from headway.serving.prompts import Prompt

Kind = Literal["completion", "chat"]


class _KeptJob(msgspec.Struct, frozen=True):
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
class Ticket:
    """One HTTP request's place in the journal. `said`: what was told to each prompt before a restart."""

    journal: Journal
    number: int
    said: Sequence[Sequence[Delta]] | None = None

    @classmethod
    def of(cls, journal: Journal, request_id: str, kind: Kind, job: Job) -> Ticket:
        """The request is accepted."""
        kept = _KeptJob(
            kind, job.model, job.params, job.text, job.slo, job.priority, job.timeout_s, job.stream, job.include_usage
        )
        prompts = [prompt.data for prompt in job.prompts]
        return cls(journal, journal.accept(request_id, msgspec.msgpack.encode(kept), prompts))

    def before(self, index: int) -> Sequence[Delta]:
        """What prompt `index` was told before a restart."""
        return self.said[index] if self.said is not None else ()

    @property
    def resumes(self) -> bool:
        """Whether an earlier server accepted it."""
        return self.said is not None

    def tell(self, index: int, delta: Delta) -> None:
        """Before the client hears it."""
        self.journal.told(self.number, index, delta)

    def end(self) -> None:
        """The client has had its answer, or has left."""
        self.journal.end(self.number)


def job_of(entry: Entry, now_s: float, unix_s: float) -> tuple[Kind, Job]:
    """The job of a request that an earlier server accepted. It queues from when it came; a time limit begins anew."""
    kept = msgspec.msgpack.decode(entry.accepted.job, type=_KeptJob)
    age_s = max(0.0, unix_s - entry.accepted.at_s)
    job = Job(
        model=kept.model,
        prompts=tuple(Prompt(memoryview(data), len(data) // 4) for data in entry.accepted.prompts),
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
