"""Samples of what a cluster computes and sends outside of its schedulers: span tasks and KV slices."""

from __future__ import annotations

from headway.runtime.cluster.attempt import RequestAttempt
from headway.runtime.engine.instance_protocol import FromInstance, KvArrived, SpanTaskDone
from headway.runtime.engine.protocol import ChunkSample, EngineSamples, IterationSample, TransferSample


def samples_of(number: int, message: FromInstance, attempt: RequestAttempt) -> EngineSamples | None:
    """Return the samples of a message of instance `number`; None for one that ends neither task nor slice."""
    name = attempt.asked.submit.id
    match message:
        case KvArrived():
            return EngineSamples(transfers=(TransferSample(name, message.source, message.began_s, message.ended_s),))
        case SpanTaskDone():
            return EngineSamples((_task(name, number, message, attempt),))
    return None


def _task(name: str, number: int, message: SpanTaskDone, attempt: RequestAttempt) -> IterationSample:
    begun_s = message.began_s
    # A group that decodes in place: the task is one token.
    if attempt.step is not None or message.index >= len(attempt.runs):
        return IterationSample(0, 0, begun_s, begun_s, message.ended_s, 0.0, 1)
    span = attempt.runs[message.index]
    prompt = max(span.end, attempt.request.prompt_tokens)
    limit = "rest of the prompt" if span.end >= prompt else "host or KV shard"
    # What the group computes together counts once: each instance shows its part.
    share = -(-(span.end - span.start) // len(span.group))
    start = min(span.end, span.start + share * span.group.index(number))
    chunk = ChunkSample(name, start, min(share, span.end - start), prompt - start, limit)
    return IterationSample(0, 0, begun_s, begun_s, message.ended_s, 0.0, 0, (chunk,))
