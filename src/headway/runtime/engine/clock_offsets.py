"""Correction of times in messages of an engine on another host, whose CLOCK_MONOTONIC has another origin."""

from __future__ import annotations

from msgspec.structs import replace

from headway.runtime.engine.instance_protocol import FromInstance, KvArrived, SpanTaskDone
from headway.runtime.engine.protocol import EngineInfo, EngineSamples, FatalError, IterationOutputs, OutputDelta

Message = EngineInfo | IterationOutputs | FatalError | FromInstance


def by_our_clock(message: Message, ahead_s: float) -> Message:
    """Return the message with `ahead_s` added to all times."""
    match message:
        case IterationOutputs(deltas=deltas, samples=samples):
            moved_samples = None if samples is None else _samples(samples, ahead_s)
            return replace(message, deltas=tuple(_delta(each, ahead_s) for each in deltas), samples=moved_samples)
        case SpanTaskDone(delta=delta):
            moved = None if delta is None else _delta(delta, ahead_s)
            began_s, ended_s = message.began_s + ahead_s, message.ended_s + ahead_s
            return replace(message, began_s=began_s, ended_s=ended_s, delta=moved)
        # Other messages carry no times.
        case KvArrived():
            return replace(message, began_s=message.began_s + ahead_s, ended_s=message.ended_s + ahead_s)
    return message


def _samples(samples: EngineSamples, ahead_s: float) -> EngineSamples:
    iterations = (
        replace(one, decided_s=one.decided_s + ahead_s, start_s=one.start_s + ahead_s, end_s=one.end_s + ahead_s)
        for one in samples.iterations
    )
    return EngineSamples(tuple(iterations), tuple(replace(one, due_s=one.due_s + ahead_s) for one in samples.waiting))


def _delta(delta: OutputDelta, ahead_s: float) -> OutputDelta:
    """Correct a delta. A time of 0 is unknown and stays."""
    first_s = delta.first_scheduled_s
    return replace(
        delta,
        emitted_s=delta.emitted_s and delta.emitted_s + ahead_s,
        first_scheduled_s=None if first_s is None else first_s + ahead_s,
    )
