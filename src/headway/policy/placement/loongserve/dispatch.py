"""Which waiting prompts begin now, in order of arrival (LoongServe §5.1).

A prompt is taken when KV has room for all of it and its output, and when the instances that decodes could leave are
nearly as fast as all of them: what is lost by not waiting for decodes to end is at most that wait. Once one has to
wait, it and those behind it may still begin in the place of decodes that are paused, while what the decodes lose
(normalised by the tokens that they have made) is at most what the prompts gain (by their lengths).
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.policy.placement.loongserve.decodes import reserve_of
from headway.policy.placement.loongserve.options import LoongServeOptions
from headway.policy.placement.loongserve.times import BatchSum, ScalingTimes, length


def dispatch(
    pending: Sequence[Request],
    times: ScalingTimes,
    options: LoongServeOptions,
    *,
    instances: int,
    capacity: int,
    used: int,
    reserved: int,
    decodes: Sequence[int],
    mean_output: float,
) -> list[Request]:
    """Prompts to begin with, in order of arrival.

    capacity: KV tokens of an instance; used: of those that decode; reserved: with their output. decodes: output tokens
    that each decoding request has; mean_output: of requests that have ended.
    """
    left_steps = max([10.0, *(max(mean_output - made, 0.1 * made) for made in decodes)])
    wait_s = left_steps * options.decode_step_s
    lost = sum(1.0 / max(1, made) for made in decodes)
    free = instances - -(-used // capacity)
    single = options.prefill == "single"
    chosen: list[Request] = []
    unsure: list[Request] = []
    now, best, paused = BatchSum(times, free), BatchSum(times, instances), BatchSum(times, instances)
    tokens, kept, gained, accepted = 0, reserved, 0.0, 0
    for request in pending:
        mine = length(request)
        if kept + reserve_of([request]) > capacity * instances or (tokens and tokens + mine > options.round_tokens):
            break
        if single and len(chosen) + len(unsure) == instances:
            break
        if not unsure and tokens + mine <= free * capacity and not (single and len(chosen) == free):
            took_s = now.with_one(mine)
            in_time = took_s <= options.round_s
            if took_s - best.with_one(mine) <= wait_s and (in_time or not chosen):
                chosen.append(request)
                for total in (now, best, paused):
                    total.add(mine)
                tokens, kept = tokens + mine, kept + reserve_of([request])
                if not in_time:
                    break
                continue
        if not options.preempt or not decodes:
            break
        unsure.append(request)
        paused.add(mine)
        tokens, kept, gained = tokens + mine, kept + reserve_of([request]), gained + 1.0 / mine
        in_time = paused.seconds <= options.round_s
        if paused.seconds * lost <= wait_s * gained and (in_time or len(chosen) + len(unsure) == 1):
            accepted = len(unsure)
        if not in_time:
            break
    return chosen + unsure[:accepted]
