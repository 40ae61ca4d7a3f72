"""LoongServe's decisions about batches: which prompts begin now (§5.1), how they are batched and on how many instances
(§5.3), and the decode batches that follow.

Prompts are ordered by length, longest first, instances by the KV on them; a batch is consecutive prompts on consecutive
instances. f[i][k] is the least sum, over the first i prompts on the first k instances, of a prompt's batch's time over
its own length: f[i][k] = min over j < i, l <= k of f[j][k - l] + T(j..i, l) · Σ 1/length, or f[i][k - 1]: instances may
stay unused. All splits are tried (as vectors); the published code leaves some out by monotonicity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Self

import numpy as np
from pydantic import model_validator

from headway.core.file_sections import Count, CountOrZero, Seconds
from headway.core.request import Request
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.policy.placement.contract import final_tokens, members_for
from headway.policy.placement.registry import PolicyOptions

PrefillSeconds = Callable[[int, int, int], float]
"""Seconds of one prompt: (tokens, instances, nodes)."""


class PrefillBatch(NamedTuple):
    """Prompts [first, last) on instances [start, stop), both by position in their order."""

    first: int
    last: int
    start: int
    stop: int


def partition(
    tokens: Sequence[int],
    room: Sequence[float],
    nodes: Sequence[int],
    seconds: PrefillSeconds,
    most: int = 0,
    max_sp: int = 0,
    kv: Sequence[int] = (),
) -> list[PrefillBatch] | None:
    """Return the best split of prompts, longest first, over instances in order; None if KV fits in no split.

    tokens: of each prompt. room: free KV tokens of each instance; nodes: the node of each. seconds: time of a
    prompt alone; a batch takes their sum, but the time of a single token counts once. most: prompts in a batch; max_sp:
    instances of a batch (0: no limit). kv: KV tokens of each; empty: `tokens`.
    """
    n, count = len(tokens), len(room)
    if not n or not count:
        return [] if not n else None
    widest = min(max_sp or count, count)
    # predictions depend on an interval's (instances, nodes) only: far fewer shapes than intervals
    shapes = sorted(
        {_shape(nodes, stop - wide, stop) for wide in range(1, widest + 1) for stop in range(wide, count + 1)}
    )
    shape_row = {shape: at for at, shape in enumerate(shapes)}
    alone = np.array([[seconds(t, *shape) for t in tokens] for shape in shapes])
    fixed = np.array([seconds(1, *shape) for shape in shapes])
    # prefix sums, so that any batch [j, i) costs one subtraction
    sums = np.concatenate([np.zeros((len(shapes), 1)), np.cumsum(alone, axis=1)], axis=1)
    inverse = np.concatenate([[0.0], np.cumsum(1.0 / np.asarray(tokens, dtype=np.float64))])
    # the same for tokens and for free KV
    held = np.concatenate([[0.0], np.cumsum(np.asarray(kv or tokens, dtype=np.float64))])
    left = np.concatenate([[0.0], np.cumsum(np.asarray(room, dtype=np.float64))])
    # best[i, k]: least cost of the first i prompts on the first k instances
    best = np.full((n + 1, count + 1), np.inf)
    best[0, :] = 0.0
    chosen: dict[tuple[int, int], PrefillBatch] = {}
    for k in range(1, count + 1):
        wide = np.arange(1, min(widest, k) + 1)
        rows = np.array([shape_row[_shape(nodes, k - int(w), k)] for w in wide])
        space = left[k] - left[k - wide]
        # instance k - 1 may stay unused
        best[1:, k] = best[1:, k - 1]
        chosen.update({(i, k): chosen[i, k - 1] for i in range(1, n + 1) if (i, k - 1) in chosen})
        for i in range(1, n + 1):
            low = max(0, i - most) if most else 0
            j = np.arange(low, i)
            # rows: the prompts of the batch begin at j; columns: it has so many instances
            # a batch takes the sum of its prompts alone, with the time of a single token counted once
            times = sums[rows, i][None, :] - sums[rows][:, j].T - (i - j - 1)[:, None] * fixed[rows][None, :]
            costs = times * (inverse[i] - inverse[j])[:, None] + best[j][:, k - wide]
            # KV of the batch must fit its instances
            costs[(held[i] - held[j])[:, None] > space[None, :]] = np.inf
            at = int(np.argmin(costs))
            value = costs.flat[at]
            if value < best[i, k]:
                best[i, k] = value
                chosen[i, k] = PrefillBatch(int(j[at // len(wide)]), i, k - int(wide[at % len(wide)]), k)
    return _walk_back(chosen, n, count)


def _walk_back(chosen: Mapping[tuple[int, int], PrefillBatch], i: int, k: int) -> list[PrefillBatch] | None:
    """Return the batches of the best split of the first `i` prompts on the first `k` instances; None: there is none."""
    found: list[PrefillBatch] = []
    while i:
        if (i, k) not in chosen:
            return None
        found.append(chosen[i, k])
        i, k = found[-1].first, found[-1].start
    return found[::-1]


def _shape(nodes: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    return stop - start, len(set(nodes[start:stop]))


def length(request: Request) -> int:
    """Return the prompt tokens to compute: those that are not cached, at least 1."""
    return max(1, request.prompt_tokens - request.cached_tokens)


class ScalingTimes:
    """LoongServe's scaling information base (§5.5): prefill time by length and group size. Cached tokens of prompts are
    left out."""

    def __init__(self, latency: GroupLatency, nodes: Sequence[int], max_sp: int) -> None:
        """nodes: of each instance of the pool, in order; a group of some size is taken from the front. max_sp: largest
        group (0: no limit)."""
        self._latency, self._nodes = latency, nodes
        self._most = min(max_sp or len(nodes), len(nodes))
        self._known: dict[tuple[int, int, int], float] = {}

    def alone_s(self, tokens: int, sp: int, nodes: int) -> float:
        """Return the seconds of one prompt on a group."""
        key = (tokens, sp, nodes)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._latency.prefill_s(0, tokens, GroupShape(sp, nodes))
        return found

    def batch_s(self, lengths: Sequence[int], instances: int) -> float:
        """Return the seconds of prompts as one batch on so many instances; infinite on none."""
        total = BatchSum(self, instances)
        for tokens in lengths:
            total.add(tokens)
        return total.seconds

    def shape(self, instances: int) -> tuple[int, int]:
        """Return (size, nodes) of a group of so many instances, or of the largest allowed."""
        size = min(instances, self._most)
        return size, len(set(self._nodes[:size]))


class BatchSum:
    """Predicted time of a batch while prompts are added to it."""

    def __init__(self, times: ScalingTimes, instances: int) -> None:
        self._times, self._shape = times, times.shape(instances)
        self._fixed_s = times.alone_s(1, *self._shape) if instances else 0.0
        self.seconds = 0.0 if instances else float("inf")
        self._count = 0

    def with_one(self, tokens: int) -> float:
        """Return the seconds with one more prompt."""
        if not self._shape[0]:
            return float("inf")
        # the time of a single token counts once for the whole batch
        return self.seconds + self._times.alone_s(tokens, *self._shape) - (self._fixed_s if self._count else 0.0)

    def add(self, tokens: int) -> None:
        """Add a prompt."""
        self.seconds = self.with_one(tokens)
        self._count += 1


class LoongServeOptions(PolicyOptions):
    """Settings of `loongserve`. Without decode instances in the cluster, requests decode where they were prefilled
    (§4). The defaults of `round_s` to `decode_batch` are the published artifact's.

    mode `paper` fills a round only with instances whose batch has ended as a whole, and keeps room for the prompt's own
    KV when it scales down, as the published code does; `default` also fills instances that scale-down frees, and keeps
    room for the output.
    """

    prefill: Literal["batched", "single", "greedy"] = "batched"
    """`batched`: by dynamic programming (§5.3); `single`: the same with one request in a batch; `greedy`: as Tetris
    §2.4 describes it, each request on arrival, on the group that ends it first, queues included (needs decode
    instances)."""
    round_s: Seconds = 5.0
    """A request that would make a round longer is not added to it, unless it is the first."""
    round_tokens: Count = 500_000
    """Tokens of a round, likewise."""
    decode_step_s: Seconds = 0.025
    """Assumed time of an output token."""
    wait_steps: Count = 10
    """Decode steps between two looks at the queue."""
    decode_batch: Count = 128
    """Requests of one instance above which a decode batch is compute-bound."""
    migrate: bool = True
    """Pack decode batches to free instances."""
    preempt: bool = True
    """Pause decode batches for prefills that gain more."""
    max_sp: CountOrZero = 0
    """Most instances of a prefill; 0: all."""
    reserved: CountOrZero = 0
    """Instances kept for prompts below `short_tokens`, with a scheduler of their own (Medha §6.5)."""
    short_tokens: Count = 8192
    """Prompts below this go to the reserved instances."""

    @model_validator(mode="after")
    def _reserved_has_batches(self) -> Self:
        if self.reserved and self.prefill == "greedy":
            raise ValueError("`reserved` needs `prefill` batched or single")
        return self


# Decode batches: their requests, instances and KV. A batch is fixed when its prefill ends (Tetris §2.4); it only grows
# when it must be merged with another one.

UNLIMITED = 1 << 60


class DecodeBatch:
    """Requests that decode on one group."""

    __slots__ = ("group", "members", "migrating", "paused")

    def __init__(self, group: tuple[int, ...]) -> None:
        self.group = group
        self.members: dict[str, tuple[Request, float]] = {}  # with the time at which each began to decode
        self.migrating: set[str] = set()  # members whose KV is on its way to `group`
        self.paused = False  # the instances compute a prefill

    def generated(self, name: str, now: float, step_s: float) -> int:
        """Return the output tokens that a member is assumed to have: one each `step_s`."""
        request, since_s = self.members[name]
        # the first token comes with the prefill
        return min(request.max_output_tokens, 1 + int((now - since_s) / step_s))

    def tokens(self, now: float, step_s: float, ahead: int = 0) -> int:
        """Return the KV tokens of all members, `ahead` steps from now."""
        return sum(
            request.prompt_tokens + min(request.max_output_tokens, self.generated(name, now, step_s) + ahead)
            for name, (request, _) in self.members.items()
        )

    @property
    def final_tokens(self) -> int:
        """KV tokens of all members with all of their output."""
        return final_tokens_of(request for request, _ in self.members.values())


def room_of(requests: Iterable[Request], capacity: int) -> int:
    """Return the KV tokens that requests need with all of their output: one that no instance of `capacity` tokens holds
    alone needs whole instances."""
    needs = ((final_tokens(request), members_for(final_tokens(request), capacity)) for request in requests)
    return sum(tokens if members == 1 else members * capacity for tokens, members in needs)


def final_tokens_of(requests: Iterable[Request]) -> int:
    """Return the KV tokens of requests with all of their output."""
    return sum(map(final_tokens, requests))


def capacity_of(capacities: Sequence[int]) -> int:
    """Return the KV tokens that instances hold together; one whose capacity is not stated holds `UNLIMITED`."""
    return sum(capacity or UNLIMITED for capacity in capacities)


# Choice of the waiting prompts that begin now, in order of arrival (LoongServe §5.1).
#
# A prompt is dispatched when there is free KV for it and its output, and when the instances without decodes are nearly
# as fast as all of them: the time lost by not waiting for decodes to end is at most that wait. After the first prompt
# that has to wait, it and later ones may still begin in place of paused decodes, as long as the decodes' loss (over the
# tokens that they have generated) is at most the prompts' gain (over their lengths).


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
