"""Choice of the waiting prompts that begin now, in order of arrival (LoongServe §5.1).

A prompt is dispatched when there is free KV for it and its output, and when the instances without decodes are nearly as
fast as all of them: the time lost by not waiting for decodes to end is at most that wait. After the first prompt that
has to wait, it and later ones may still begin in place of paused decodes, as long as the decodes' loss (over the tokens
that they have generated) is at most the prompts' gain (over their lengths).
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.request import Request
from headway.policy.placement.loongserve.decodes import final_tokens_of
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
    """Return the prompts to begin with, in order of arrival.

    capacity: KV tokens of one instance. used: KV tokens of decoding requests; reserved: the same with all of their
    output. decodes: output tokens that each decoding request has. mean_output: output tokens of finished requests.
    """
    wait_s = _steps_left(decodes, mean_output) * options.decode_step_s
    # seconds of delay weigh by the tokens that a request has: 1 / output for decodes, 1 / length for prompts
    lost = sum(1.0 / max(1, done) for done in decodes)
    # instances left when the decodes' KV is packed
    free = instances - -(-used // capacity)
    single = options.prefill == "single"
    chosen: list[Request] = []
    preempting: list[Request] = []  # may begin only if decodes are paused
    on_free, on_all, with_paused = BatchSum(times, free), BatchSum(times, instances), BatchSum(times, instances)
    tokens, reserved_after, gained, accepted = 0, reserved, 0.0, 0
    for request in pending:
        prompt_tokens = length(request)
        # in order of arrival: a prompt that does not fit ends the round, even if a later one would
        fits = reserved_after + final_tokens_of([request]) <= capacity * instances
        full = tokens and tokens + prompt_tokens > options.round_tokens
        if not fits or full or (single and len(chosen) + len(preempting) == instances):
            break
        if not preempting and tokens + prompt_tokens <= free * capacity and not (single and len(chosen) == free):
            now_s = on_free.with_one(prompt_tokens)
            in_time = now_s <= options.round_s
            # what it loses on fewer instances is at most what it would lose by waiting for decodes
            if now_s - on_all.with_one(prompt_tokens) <= wait_s and (in_time or not chosen):
                chosen.append(request)
                for total in (on_free, on_all, with_paused):
                    total.add(prompt_tokens)
                tokens, reserved_after = tokens + prompt_tokens, reserved_after + final_tokens_of([request])
                # a first prompt longer than the round begins alone
                if not in_time:
                    break
                continue
        if not options.preempt or not decodes:
            break
        preempting.append(request)
        with_paused.add(prompt_tokens)
        tokens, gained = tokens + prompt_tokens, gained + 1.0 / prompt_tokens
        reserved_after += final_tokens_of([request])
        in_time = with_paused.seconds <= options.round_s
        # only the longest prefix of these prompts whose gain covers the decodes' loss is accepted
        if with_paused.seconds * lost <= wait_s * gained and (in_time or len(chosen) + len(preempting) == 1):
            accepted = len(preempting)
        if not in_time:
            break
    return chosen + preempting[:accepted]


def _steps_left(decodes: Sequence[int], mean_output: float) -> float:
    """Return the steps until the last decode ends: at least 10; one that is past the mean needs a tenth of its output
    more."""
    return max([10.0, *(max(mean_output - done, 0.1 * done) for done in decodes)])
