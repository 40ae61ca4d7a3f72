"""Driver of an `IterationPolicy` inside vLLM's scheduler: vLLM's requests and blocks in, token quotas for the next step
out; and the gate before vLLM's waiting queue.

Nothing here imports vLLM: requests are read through a few attributes of vLLM's, so that a driver can be rebuilt from
vLLM's state at any time, and the simulator's model of vLLM (`sim.vllm`) runs the same code.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from headway.core.request import Request
from headway.perf.latency.base import BatchLoad, decode_load, load_s
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.requests import PrefillState

VllmRequest = Any
"""`vllm.v1.request.Request`, or the simulator's `VllmRequestState`."""


_MOST = 64
"""Steps whose results never came (an executor that was reset) are forgotten beyond so many."""


class StepClock:
    """Pairs the load of a step with the time until its results came back.

    Under asynchronous scheduling step n+1 is made while step n runs: its time counts from where step n came back, so
    that what overlaps is not counted twice.
    """

    def __init__(self) -> None:
        self._steps: OrderedDict[int, tuple[float, BatchLoad, float]] = OrderedDict()
        self._returned_s = 0.0

    def made(self, key: int, now: float, load: BatchLoad, predicted_s: float) -> None:
        """Note a step that goes to the executor. `key` identifies it until it returns."""
        self._steps[key] = (now, load, predicted_s)
        if len(self._steps) > _MOST:
            self._steps.popitem(last=False)

    def returned(self, key: int, now: float) -> tuple[BatchLoad, float, float] | None:
        """(load, seconds measured, seconds predicted) of a step whose results are there; None where it is unknown."""
        step = self._steps.pop(key, None)
        began_s, self._returned_s = self._returned_s, now
        if step is None:
            return None
        made_s, load, predicted_s = step
        return load, now - max(made_s, began_s), predicted_s


class ReservedKvPool:
    """Implements `policy.iteration.admission.KvPool`.

    vLLM allocates chunk by chunk, so that several prefills in flight could run the pool dry and preempt each other:
    each is pledged what its whole prompt will take, and `free_blocks` is without it. A pledge shrinks as vLLM
    allocates (`settle`) and is dropped once the prompt is computed: decodes grow by vLLM's own rules.
    """

    answers_hold = 16
    """Asking vLLM looks a prompt up in its prefix cache, which changes meanwhile."""
    cache: None = None
    """vLLM looks prompts up itself: it reports a hit when it first schedules the request."""

    def __init__(
        self,
        n_blocks: int,
        total_tokens: int,
        free: Callable[[], int],
        needed: Callable[[str, int], int],
        reserve_tokens: int,
    ) -> None:
        """`free`: blocks that vLLM could allocate now. `needed(request_id, tokens)`: how many of them a request would
        take, beside those that it has, for `tokens` tokens in all. `reserve_tokens`: of a block."""
        self.n_blocks = n_blocks
        self.total_tokens = total_tokens
        self.reserve_tokens = reserve_tokens
        self._free = free
        self._needed = needed
        # By request: tokens that its pledge is for, and blocks of it that vLLM has not allocated yet.
        self._tokens: dict[str, int] = {}
        self._open: dict[str, int] = {}
        self._open_sum = 0
        self._held: dict[str, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that are neither allocated nor pledged; never below 0."""
        return max(0, self._free() - self._open_sum)

    @property
    def pledged_blocks(self) -> int:
        """Blocks that half-done prefills will still take."""
        return self._open_sum

    def needed_blocks(self, request_id: str, tokens: int) -> int:
        """See `KvPool`."""
        return self._needed(request_id, tokens)

    def held_blocks(self, request_id: str) -> int:
        """Return the blocks pledged to a request; 0 without a pledge."""
        return self._held.get(request_id, 0)

    def pledge(self, request_id: str, tokens: int, headroom_blocks: int = 0) -> bool:
        """See `KvPool`."""
        needed = self._needed(request_id, tokens)
        if needed + headroom_blocks > self.free_blocks:
            return False
        self._tokens[request_id] = tokens
        self._held[request_id] = needed
        self._set_open(request_id, needed)
        return True

    def settle(self, request_id: str) -> None:
        """Shrink a pledge by the blocks that vLLM has allocated to the request since."""
        if request_id in self._tokens:
            self._set_open(request_id, max(0, self._needed(request_id, self._tokens[request_id])))

    def complete(self, request_id: str) -> None:
        """End the pledge of a request whose prompt is computed."""
        if self._tokens.pop(request_id, None) is not None:
            self._set_open(request_id, 0)
            del self._open[request_id]

    def drop(self, request_id: str) -> None:
        """Forget a request that has ended, or whose blocks vLLM has preempted."""
        self.complete(request_id)
        self._held.pop(request_id, None)

    def _set_open(self, request_id: str, blocks: int) -> None:
        self._open_sum += blocks - self._open.get(request_id, 0)
        self._open[request_id] = blocks


class StepPlan(msgspec.Struct, frozen=True):
    """The policy's decision for one step."""

    quotas: dict[str, int]
    """Tokens by request, most urgent first; a prefill that is not named gets none."""
    load: BatchLoad
    """Load of the decodes and these chunks."""
    predicted_s: float


class PolicyDriver:
    """The requests that the policy decides about: each is a prefill (waiting or half done), and later a decode."""

    def __init__(self, policy: IterationPolicy, pool: ReservedKvPool) -> None:
        self.policy = policy
        self.pool = pool
        self.prefills: dict[str, VllmRequest] = {}
        # Requests that have had their first token.
        self.decoding: dict[str, VllmRequest] = {}
        # Requests whose prompt was completed by the last `advance`.
        self.completed: list[tuple[PrefillState, VllmRequest]] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.prefills or request_id in self.decoding

    # -- requests -----------------------------------------------------------------------------------------------

    def enter(self, facts: Request, request: VllmRequest, running: bool = False) -> None:
        """Add a request. `running`: it has KV for `facts.cached_tokens` tokens already (when a driver is rebuilt)."""
        if running:
            self.pool.pledge(facts.id, facts.prompt_tokens)
        decodes = running and facts.cached_tokens >= facts.prompt_tokens - 1
        self.policy.enter(facts, holds_kv=running)
        if decodes:
            self.pool.complete(facts.id)
            self.decoding[facts.id] = request
        else:
            self.prefills[facts.id] = request

    def lost(self, request: VllmRequest) -> None:
        """Requeue a request that vLLM has preempted: all its tokens are computed again."""
        name = request.request_id
        if name in self:
            self.pool.drop(name)
            self.decoding.pop(name, None)
            self.prefills[name] = request
            self.policy.lost(name, request.num_tokens)

    def ended(self, request_id: str) -> None:
        """Remove a finished or aborted request. Unknown ones are ignored."""
        if request_id in self:
            self.pool.drop(request_id)
            self.decoding.pop(request_id, None)
            self.prefills.pop(request_id, None)
            self.policy.ended(request_id)

    # -- steps --------------------------------------------------------------------------------------------------

    def plan_step(
        self,
        running: list[VllmRequest],
        now: float,
        admits_new: bool,
        rows_each: int = 1,
        barred: Collection[str] = (),
    ) -> tuple[StepPlan, list[VllmRequest]] | None:
        """Return the quotas of the next step beside the decodes among `running`, each of `rows_each` rows; and
        `running` with decodes first, then prefills by urgency, since vLLM preempts from its end.

        `barred`: waiting requests that vLLM would not start in this step.
        None: the policy would wait although nothing runs that could free KV; the caller lets vLLM decide."""
        decodes = [request for request in running if not request.is_prefill_chunk]
        kv_sum = sum([request.num_computed_tokens for request in decodes])
        plan = self.plan(len(decodes), rows_each * len(decodes), kv_sum, now, admits_new, barred)
        if not (plan.quotas or running or self.prefills.keys() <= set(barred)):
            return None
        place = {name: i for i, name in enumerate(plan.quotas)}
        prefills = [request for request in running if request.is_prefill_chunk]
        prefills.sort(key=lambda request: place.get(request.request_id, len(place)))
        return plan, decodes + prefills

    def quota(self, plan: StepPlan, request_id: str, running: bool) -> int | None:
        """Return the tokens that a request may take; None: no limit by the policy."""
        quota = plan.quotas.get(request_id)
        if quota is not None or request_id not in self.prefills:
            return quota
        # Not running: its KV was loaded by a connector, and vLLM ends its scan where such a request gets nothing.
        return 0 if running else int(self.policy.config.min_chunk)

    def plan(
        self, decodes: int, rows: int, kv_sum: int, now: float, admits_new: bool, barred: Collection[str] = ()
    ) -> StepPlan:
        """Return the quotas of a step in which `decodes` requests decode, in `rows` rows over `kv_sum` tokens.

        `barred`: see `plan_step`."""
        load = decode_load(self.policy.latency, decodes, kv_sum)
        # Speculative tokens are verified in rows of their own.
        if rows != decodes:
            load = msgspec.structs.replace(load, tokens=rows)
        if self.prefills:
            decision = self.policy.pick(load, now, skip=barred, admits_new=admits_new)
            quotas, load = decision.quotas, decision.load
        else:
            quotas = {}
        return StepPlan(quotas, load, load_s(self.policy.latency, load))

    def scheduled(self, plan: StepPlan, tokens: Mapping[str, int]) -> BatchLoad:
        """Move the policy by the tokens that vLLM has scheduled of each request. Return the actual load of the step."""
        chunks = {name: tokens[name] for name in tokens.keys() & self.prefills.keys()}
        rows = sum(tokens.values()) - sum(chunks.values())
        return self.advance(plan, chunks, len(tokens) - len(chunks), rows)

    def advance(self, plan: StepPlan, chunks: Mapping[str, int], others: int, rows: int) -> BatchLoad:
        """See `scheduled`: tokens by prefill, and the number of all other requests with their tokens."""
        tokens = sum(chunks.values())
        exact = sum(plan.quotas.values()) == tokens and plan.load.tokens == tokens + rows
        load = plan.load if exact else self._real_load(plan, chunks, others, rows)
        self.completed = []
        for name in sorted(chunks, key=self._place(plan)) if len(chunks) > 1 else chunks:
            self._advance(name)
        self.policy.began()
        return load

    def observed(self, load: BatchLoad, seconds: float) -> None:
        """Pass the measured duration of a step to the latency model."""
        self.policy.budget.arrivals.worked(seconds)
        self.policy.observed(load, seconds)

    def _advance(self, name: str) -> None:
        """Move the policy's cursor to vLLM's, which decides when outputs in flight have let the prompt grow."""
        request = self.prefills[name]
        state = self.policy.holders.get(name)
        known = state.known if state is not None else request.num_tokens
        if request.is_prefill_chunk:
            # Still a prefill for vLLM: keep one token, so that the policy does not count it as complete.
            self.policy.moved(name, min(request.num_computed_tokens, known - 1))
            self.pool.settle(name)
            return
        self.policy.moved(name, known)
        self.policy.decoding(name)
        if state is not None:
            self.completed.append((state, request))
        self.pool.complete(name)
        self.decoding[name] = request
        del self.prefills[name]

    def _real_load(self, plan: StepPlan, chunks: Mapping[str, int], others: int, rows: int) -> BatchLoad:
        """Return the load if vLLM has scheduled other numbers: limits of its own, or requests outside the policy."""
        latency = self.policy.latency
        load = decode_load(latency, others, plan.load.decode_kv)
        load = msgspec.structs.replace(load, tokens=rows)
        for name in sorted(chunks):
            count = chunks[name]
            past = max(0, self.prefills[name].num_computed_tokens - count)
            load = load.with_chunk(count, latency.attention_s(past, count), past)
            latency = latency.further_prompts()
        return load

    @staticmethod
    def _place(plan: StepPlan) -> Any:
        places = {name: place for place, name in enumerate(plan.quotas)}
        return lambda name: (places.get(name, len(places)), name)


_MOST_ROWS = 16
"""Rows that are filled: the distance of vLLM's own sizes. Beyond it attention to a long history would not be free."""


def fill_graph(plan: StepPlan, sizes: Sequence[int], states: Mapping[str, PrefillState]) -> StepPlan:
    """Return a plan whose cut prefills, most urgent first, also get the rows up to the next of `sizes`.

    `sizes`: tokens of the captured graphs, ascending; larger steps run without one, and stay as they are. `states`: of
    the prefills that have quotas."""
    place = bisect_left(sizes, plan.load.tokens)
    spare = min(sizes[place] - plan.load.tokens, _MOST_ROWS) if place < len(sizes) else 0
    filled = dict(plan.quotas)
    for name, tokens in plan.quotas.items():
        more = min(spare, states[name].remaining - tokens)
        filled[name] += more
        spare -= more
    return replace(plan, quotas=filled)


# vLLM's waiting queue behind a gate: `schedule()` sees only the requests that may be taken in this step.
#
# vLLM's scan stops at the first request that gets no tokens (or, from 0.33 on, looks up the prefix cache for each that
# is put aside). Behind the gate neither happens: the scan finds the policy's choice, in its order, and then an empty
# queue.


class GatedQueueMethods:
    """The methods of vLLM's `RequestQueue` over its own queue of all waiting requests; `scheduler` adds the base class.

    Truth value, peek and pop follow the gate; length, iteration, additions and removals are those of all requests, as
    metrics and aborts expect. An open gate is vLLM's own queue.
    """

    def __init__(self, everyone: Any) -> None:
        # vLLM's own queue, in vLLM's order.
        self._all = everyone
        # Requests that the scan may take, in the policy's order; None: the gate is open.
        self._visible: deque[VllmRequest] | None = None

    def show(self, requests: Iterable[VllmRequest]) -> None:
        """Close the gate for all but these, which must be in the queue. Called before each `schedule()`."""
        self._visible = deque(requests)

    def open(self) -> None:
        """Show everything in vLLM's order: no policy decides."""
        self._visible = None

    def add_request(self, request: VllmRequest) -> None:
        """A new request; not visible before the next `show`."""
        self._all.add_request(request)

    def pop_request(self) -> VllmRequest:
        """The first visible request leaves the queue."""
        if self._visible is None:
            return self._all.pop_request()
        request = self._visible.popleft()
        self._all.remove_request(request)
        return request

    def peek_request(self) -> VllmRequest:
        """The first visible request stays."""
        return self._all.peek_request() if self._visible is None else self._visible[0]

    def prepend_request(self, request: VllmRequest) -> None:
        """A preempted request; not visible before the next `show`."""
        self._all.prepend_request(request)

    def prepend_requests(self, requests: Iterable[VllmRequest]) -> None:
        """Requests that `schedule()` has put aside, which end its scan."""
        self._all.prepend_requests(requests)

    def remove_request(self, request: VllmRequest) -> None:
        """A request has ended while it waited."""
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[VllmRequest]) -> None:
        """Requests have ended while they waited; those that are not here are ignored."""
        gone = set(requests)
        self._all.remove_requests(gone)
        if self._visible is not None:
            self._visible = deque(r for r in self._visible if r not in gone)

    def __bool__(self) -> bool:
        return bool(self._all if self._visible is None else self._visible)

    def __getitem__(self, place: int) -> VllmRequest:
        """A request by its place among all: a first-come queue of vLLM's can be indexed."""
        return self._all[place]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[VllmRequest]:
        return iter(self._all)
