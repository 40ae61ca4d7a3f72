"""A request's entry in the journal: written while the request is served, read back after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from headway.core.request import Slo
from headway.core.sampling import SamplingParams
from headway.runtime.engine.protocol import OutputDelta
from headway.serving.generation_job import GenerationJob, TextOptions
from headway.serving.journal import JournalEntry
from headway.serving.journal_writer import JournalWriter
from headway.serving.prompts import TokenPrompt

Kind = Literal["completion", "chat", "response"]


class _JournaledJob(msgspec.Struct, frozen=True):
    """A `GenerationJob` without its prompts, in the journal's encoding."""

    kind: Kind
    model: str
    params: SamplingParams
    text: TextOptions
    slo: Slo
    priority: int
    timeout_s: float | None
    stream: bool
    include_usage: bool
    request_class: str | None = None
    continuous_usage: bool = False
    choices: int = 1
    cache_salt: str = ""
    cache_prompt: bool = True


@dataclass(slots=True)
class JournaledRequest:
    """One HTTP request's entry in the journal."""

    journal: JournalWriter
    number: int
    earlier: Sequence[Sequence[OutputDelta]] | None = None
    """Output from before a restart, by prompt; None for a request that this server accepted."""

    @classmethod
    async def of(
        cls, journal: JournalWriter, request_id: str, key: str, owner: str, kind: Kind, job: GenerationJob
    ) -> JournaledRequest:
        """Record a request that was just accepted. Raises UnavailableError when the disk takes nothing more."""
        saved = _JournaledJob(
            kind, job.model, job.params, job.text, job.slo, job.priority, job.timeout_s, job.stream, job.include_usage,
            job.request_class, job.continuous_usage, job.choices, job.cache_salt, job.cache_prompt,
        )  # fmt: skip
        prompts = [prompt.data for prompt in job.prompts]
        return cls(journal, await journal.accept(request_id, msgspec.msgpack.encode(saved), prompts, owner, key))

    def emitted_before(self, index: int) -> Sequence[OutputDelta]:
        """Return the output of prompt `index` from before a restart."""
        return self.earlier[index] if self.earlier is not None else ()

    @property
    def resumes(self) -> bool:
        """Whether an earlier server accepted the request."""
        return self.earlier is not None

    async def write(self, index: int, delta: OutputDelta) -> None:
        """Record output of prompt `index`; called before it is sent to the client."""
        await self.journal.write_output(self.number, index, delta)

    def end(self) -> None:
        """Record that the request has ended: answered, or abandoned by its client."""
        self.journal.end(self.number)


def job_of(entry: JournalEntry, now_s: float, unix_s: float) -> tuple[Kind, GenerationJob]:
    """Restore the job of a request that an earlier server accepted.

    now_s, unix_s: the present on the monotonic and on the Unix clock. Queue time counts from the first acceptance; a
    time limit starts again from now.
    """
    saved = msgspec.msgpack.decode(entry.accepted.job, type=_JournaledJob)
    # The Unix clock may have been set back between the two processes.
    age_s = max(0.0, unix_s - entry.accepted.at_s)
    job = GenerationJob(
        model=saved.model,
        # int32: four bytes per token id
        prompts=tuple(TokenPrompt(memoryview(data), len(data) // 4) for data in entry.accepted.prompts),
        params=saved.params,
        text=saved.text,
        slo=saved.slo,
        priority=saved.priority,
        # `timeout_s` counts from `received_s`, which lies `age_s` in the past.
        timeout_s=None if saved.timeout_s is None else saved.timeout_s + age_s,
        received_s=now_s - age_s,
        stream=saved.stream,
        include_usage=saved.include_usage,
        request_class=saved.request_class,
        continuous_usage=saved.continuous_usage,
        choices=saved.choices,
        cache_salt=saved.cache_salt,
        cache_prompt=saved.cache_prompt,
    )
    return saved.kind, job
