"""Decode batches that are paused so that prompts can begin on their instances (LoongServe §5.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.policy.placement.loongserve.decodes import DecodeBatch, capacity_of
from headway.policy.placement.loongserve.times import ScalingTimes


def decodes_to_pause(
    decodes: Sequence[DecodeBatch],
    lengths: Sequence[int],
    idle: Sequence[int],
    capacity: Mapping[int, int],
    times: ScalingTimes,
    now: float,
    step_s: float,
) -> list[DecodeBatch]:
    """Return batches of `decodes` to pause: until the prompts' KV fits, then those whose loss is below the prompts'
    gain (Eq. 3, 4).

    lengths: of the prompts. idle: instances without work. capacity: KV tokens of each instance. step_s: assumed time of
    one decode step."""

    def room(group: Sequence[int]) -> int:
        return capacity_of([capacity[i] for i in group])

    taken: list[DecodeBatch] = []
    count, short = len(idle), sum(lengths) - room(idle)
    candidates = [b for b in decodes if len(b.group) == 1 and not b.paused and not b.migrating and b.members]
    candidates.sort(key=lambda b: (b.final_tokens - room(b.group), b.group))
    for batch in candidates:
        if short <= 0 and count:
            more_s = times.batch_s(lengths, count + 1)
            gain = (times.batch_s(lengths, count) - more_s) * sum(1 / tokens for tokens in lengths)
            generated = sum(batch.generated(name, now, step_s) for name in batch.members)
            # loss (Eq. 3): more_s * sum of 1 / output, with the batch's mean output: members * members / generated
            if gain < more_s * len(batch.members) ** 2 / generated:
                continue
        taken.append(batch)
        short -= room(batch.group) - batch.final_tokens
        count += 1
    return taken
