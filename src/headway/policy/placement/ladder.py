"""The ladder in a cluster: nothing is bound to an instance before it can run there.

Prompts wait in one queue, in the order of the ladder (`policy.ladder`): fewest late; a late one gets twice the time,
again and again; shortest first as long as it makes no other late. Work counts in instance-seconds, and the cluster does
as many a second as it has instances. Running groups are in that order too, since they can be paused. Whenever an
instance runs out of work, the first in order that can use it takes it:

- A prompt that one instance computes in a few iterations goes to the scheduler of one with at most `_AHEAD_S` of work
  before it, so that short ones are batched there.
- A longer one gets a group of idle instances, whose size is the one of least cost (`ladder_groups`). If a larger group
  that is free later costs less, those that are idle now are kept for it, and compute meanwhile what ends before.
- A prompt that would be late pauses a running group at a layer's edge, if that one stays in time. A paused group is in
  the queue with the work that is left, and goes on when its turn comes.

Instances that decode as well compute each prompt in their schedulers, which keep the same order: there a short prompt
does not count longer ones as work before it. Only a prompt that none of them can hold, or that finds several empty
ones, gets a group.

A prompt begins only if there is KV room for it, where it is computed and where it will decode. One that is late already
and finds none has a claim on the instance with the most, so that later ones cannot keep it out for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway.core.request import Phase, Span
from headway.policy.ladder import ladder_order
from headway.policy.placement.baselines import prefill_instances
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    Event,
    PlacementPolicy,
    PreemptRequest,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    ResumeRequest,
    SpanDone,
    SpanPaused,
    final_tokens,
    members_for,
)
from headway.policy.placement.kv_places import (
    DecodePlacement,
    PrefixStart,
    cheapest_start,
    decode_instances,
    longest_prefix,
)
from headway.policy.placement.ladder_groups import (
    ALONE,
    LATE_WEIGHT,
    STRIPED,
    ArrivingWork,
    Choice,
    FreeInstances,
    GroupSizing,
    Prompt,
)
from headway.policy.placement.registry import PolicyContext, PolicyOptions

_AHEAD_S = 0.1
"""Work of an instance's scheduler up to which it takes another prompt: about two iterations."""
_BATCHED_S = 0.5
"""A prompt that takes longer on one instance is a group of one, which can be paused: cut into iterations it would
pay for each."""
_DUE_S, _DUE_TIMES = 1.0, 5.0
"""Without an SLO, a first token is due so many seconds after arrival, or so many times its fastest prefill."""
_DECODE_AHEAD_S = 2.0
"""A prompt that takes longer does not wait for room where it will decode, and keeps none there: until its end all will
have changed, and to drain an instance for one long prompt would make many short ones late."""
_LOOK = 16
"""Prompts without a place after which the rest of the queue is not looked at: far more than may overtake."""
_LEAST_LEFT_S = 0.2
"""A running group with less to do is not paused."""
_LEAST_WAKE_S = 0.005
"""Least seconds until the queue is looked at again by itself."""
_PAUSE_TIMES = 4.0
"""A pause saves at least so many times the prompt's own time: it idles the rest of the group."""
_ORDER_S = 0.05
"""Seconds for which an order holds while the queue does not change."""


class LadderOptions(PolicyOptions):
    """`ladder` has no settings: it predicts what they would say."""


@dataclass(slots=True, eq=False)
class RunningGroup:
    """A prompt that a group computes, or has paused."""

    prompt: Prompt
    group: tuple[int, ...]
    end_s: float
    left_s: float = 0.0
    """Seconds of work that are left, where it is paused."""
    pausing: bool = False
    pausable: bool = True


class LadderPlacement(PlacementPolicy):
    """See the module."""

    def __init__(self, context: PolicyContext, options: LadderOptions) -> None:
        self._context, self._sizing, self._arriving = context, GroupSizing(context), ArrivingWork()
        self._decodes = DecodePlacement()
        self._waiting: dict[str, Prompt] = {}
        self._running: dict[str, RunningGroup] = {}
        self._paused: dict[str, RunningGroup] = {}
        self._placed: dict[str, tuple[Prompt, int]] = {}  # prompts in schedulers, with their instance
        self._on: dict[int, dict[str, float]] = {}  # seconds of the prompts in each instance's scheduler
        self._ordered: list[tuple[str, Prompt]] = []
        self._ordered_s = -1.0
        self._long: set[str] = set()  # requests whose KV is not counted where they decode before it is there
        self._wake_s: float | None = None

    # -- events -------------------------------------------------------------------------------------------------------

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        actions = self._take_in(event, view)
        return [*actions, *self._schedule(view)]

    def next_wakeup(self, now: float) -> float | None:
        return self._wake_s

    def _take_in(self, event: Event, view: ClusterSnapshot) -> list[Action]:
        """Bring the state up to date; return the actions for decodes."""
        if isinstance(event, RequestArrived):
            self._arrived(event, view)
            return []
        if isinstance(event, SpanDone):
            self._running.pop(event.request, None)
            return self._decodes.prefilled(event.request)
        if isinstance(event, SpanPaused):
            self._stopped(event.request, view)
            return []
        if isinstance(event, RequestPrefilled):
            self._left(event.request)
            return self._decodes.prefilled(event.request)
        if isinstance(event, RequestFinished | RequestDropped):
            self._left(event.request)
            self._long.discard(event.request)
            for requests in (self._waiting, self._running, self._paused):
                if requests.pop(event.request, None) is not None:
                    self._ordered_s = -1.0
        elif isinstance(event, ActionRefused):
            self._refused(event)
            return []
        return self._decodes.on_event(event)

    def _arrived(self, event: RequestArrived, view: ClusterSnapshot) -> None:
        instances = prefill_instances(view, "ladder")
        request, copies = event.request, self._context.copies_prefixes
        prefix = longest_prefix(event.cached, None if copies else instances)
        prompt = self._waiting[request.id] = Prompt(request, event.cached, prefix)
        self._sizing.measure(prompt, len(instances), max(map(len, view.by_node.values())))
        due_s = max(_DUE_S, _DUE_TIMES * prompt.fastest_s)
        prompt.target_s = due_s if request.slo.ttft_s is None else request.slo.ttft_s
        self._arriving.add(prompt.work_s, view.now_s)
        self._ordered_s = -1.0

    def _stopped(self, request: str, view: ClusterSnapshot) -> None:
        """Queue a group that has paused, with what is left of its time."""
        running = self._running.pop(request, None)
        if running is not None:
            running.pausing = False
            running.left_s = max(0.0, running.end_s - view.now_s)
            self._paused[request] = running
            self._ordered_s = -1.0

    def _left(self, request: str) -> None:
        """Forget a prompt in a scheduler."""
        placed = self._placed.pop(request, None)
        if placed is not None:
            self._on[placed[1]].pop(request, None)

    def _refused(self, event: ActionRefused) -> None:
        """Queue again what was not carried out. A refused pause (the group is in its last layer) is not tried again."""
        name = event.request
        if event.action == "preempt" and name in self._running:
            self._running[name].pausing = self._running[name].pausable = False
        elif event.action == "resume" and name in self._running:
            self._paused[name] = self._running.pop(name)
        elif event.action == "commit" and name in self._running:
            self._waiting[name] = self._running.pop(name).prompt
        elif event.action == "enqueue" and name in self._placed:
            self._waiting[name] = self._placed[name][0]
            self._left(name)
        else:
            return
        if name in self._waiting:
            self._decodes.withdraw(name)
        self._ordered_s = -1.0

    # -- order --------------------------------------------------------------------------------------------------------

    def _order(self, now: float, instances: int) -> list[tuple[str, Prompt]]:
        """Return those that wait or are paused, the first to go first."""
        if 0 <= now - self._ordered_s < _ORDER_S:
            return self._ordered
        yielding = {name: each for name, each in self._running.items() if self._may_pause(each, now)}
        groups = [*self._paused.values(), *yielding.values()]
        for each in yielding.values():
            each.left_s = each.end_s - now
        names = [*self._waiting, *self._paused, *yielding]
        prompts = [*self._waiting.values(), *(each.prompt for each in groups)]
        works = [each.work_s for each in self._waiting.values()] + [each.left_s * len(each.group) for each in groups]
        others_s = sum(
            max(0.0, each.end_s - now) * len(each.group) for name, each in self._running.items() if name not in yielding
        )
        order, steps = ladder_order(
            [each.request.arrival_s for each in prompts],
            [each.request.arrival_s + each.target_s for each in prompts],
            works,
            [each.steps for each in prompts],
            now,
            float(instances),
            # instances become free one after the other: half of what runs on is in the way of the mean prompt
            0.5 * others_s,
            [each.request.priority for each in prompts],
        )
        for prompt, climbed in zip(prompts, steps, strict=True):
            prompt.steps = climbed
        self._ordered, self._ordered_s = [(names[index], prompts[index]) for index in order], now
        return self._ordered

    # -- placement ----------------------------------------------------------------------------------------------------

    def _schedule(self, view: ClusterSnapshot) -> list[Action]:
        """Give instances that run out of work to those that wait, in order."""
        self._wake_s = None
        instances = view.with_role("mixed", "prefill")
        if not instances or not (self._waiting or self._paused):
            return []
        now = view.now_s
        for running in self._running.values():
            running.end_s = max(view.instances[i].free_at_s for i in running.group)
        moment = self._moment(instances, view)
        actions, paused, without, ahead_s = list[Action](), list[Action](), 0, 0.0
        # when the first group that may be paused ends by itself
        freed_s = min((each.end_s for each in self._running.values()), default=math.inf)
        available = len(instances) - sum(len(each.group) for each in self._running.values())
        may_pause = any(self._may_pause(each, now) for each in self._running.values())
        for name, prompt in list(self._order(now, len(instances))) if moment.open or may_pause else ():
            if name in self._paused:
                actions += self._resume(name, moment)
            elif name in self._waiting:
                placed = self._place(prompt, moment, view) if without < _LOOK and moment.open else []
                actions += placed
                if placed:
                    continue
                without += 1
                ahead_s += prompt.work_s
                end_s = now + ahead_s / available if available else math.inf
                if may_pause and not paused and prompt.due_s < min(end_s, freed_s):
                    paused = self._pause_for(prompt, moment, freed_s - now)
        if self._waiting or self._paused:
            self._wake_s = moment.next_s
        return [*actions, *paused]

    def _moment(self, instances: Sequence[int], view: ClusterSnapshot) -> _Moment:
        in_groups = {i: each for each in self._running.values() for i in each.group}
        apart, ahead_s = bool(view.with_role("decode")), dict[int, float]()
        for i in instances:
            # what takes longer than predicted has not ended either
            under_way = i in in_groups or (apart and view.instances[i].running > 0)
            ahead_s[i] = max(_LEAST_WAKE_S if under_way else 0.0, view.instances[i].free_at_s - view.now_s)
        return _Moment(view, ahead_s, in_groups)

    def _resume(self, name: str, moment: _Moment) -> list[Action]:
        """Continue a paused group once its instances have nothing else to do."""
        paused = self._paused[name]
        start_s = moment.free_for(paused.group)
        moment.keep(paused.group, start_s, start_s + paused.left_s)
        if start_s > moment.now:
            return []
        self._running[name] = self._paused.pop(name)
        paused.end_s = start_s + paused.left_s
        moment.take(paused.group, max(paused.end_s, moment.now + _LEAST_WAKE_S), 0)
        self._ordered_s = -1.0
        return [ResumeRequest(name)]

    def _place(self, prompt: Prompt, moment: _Moment, view: ClusterSnapshot) -> list[Action]:
        """Return what begins a prompt now; nothing if it has to wait, with what it waits for taken into account."""
        request, decode = prompt.request, None
        # What no decode instance's pool holds decodes on its group.
        if decode_instances(view, final_tokens(request)) and request.max_output_tokens > 1:
            decode = self._decode_for(prompt, moment)
            if decode is None:
                if prompt.steps:
                    moment.claim(prompt, moment.decodes)
                return []
        least = moment.least_size(final_tokens(request))
        choices = [*self._scheduled(prompt, moment, view, least), *self._groups(prompt, moment, view, least)]
        if not choices:
            moment.make_room(prompt, least)
            return []
        best = min(choices, key=lambda choice: choice[:4])
        if best.scheduled and best.start_s <= moment.now + _AHEAD_S:
            return self._enqueue(prompt, best, decode, moment, view)
        if not best.scheduled and best.start_s <= moment.now:
            return self._commit(prompt, best, decode, moment, view)
        moment.keep(best.group, best.start_s, best.end_s)
        return []

    def _decode_for(self, prompt: Prompt, moment: _Moment) -> int | None:
        """Return the instance that is to decode a request: of those with room for its KV the one with the most room for
        each of its requests. None: none has room."""
        tokens, found = prompt.request.prompt_tokens, list[tuple[float, int]]()
        if prompt.fastest_s > _DECODE_AHEAD_S:
            tokens = 1
        far = self._decodes.reserved(self._long)
        for i in decode_instances(moment.view, final_tokens(prompt.request)):
            room = moment.room(i, self._decodes.virtual_usage(i) - far.get(i, 0))
            if room >= tokens:
                found.append((-room / (1 + moment.running(i)), i))
        return min(found)[1] if found else None

    def _scheduled(self, prompt: Prompt, moment: _Moment, view: ClusterSnapshot, least: int) -> Iterator[Choice]:
        """Yield the cost of each instance whose scheduler may compute a prompt. least: instances that its KV needs."""
        now, price = moment.now, self._price(moment)
        if least > 1 or (moment.decodes and not self._batched(prompt)):
            return
        tokens = prompt.request.prompt_tokens
        decodes = decode_instances(view, final_tokens(prompt.request)) if prompt.request.max_output_tokens > 1 else ()
        candidates = [*moment.ahead_s, *decodes]
        for i in candidates:
            if not moment.has_room(i, tokens):
                continue
            start = self._start(prompt, i, view)
            start_s = now + self._ahead_s(i, start.seconds, moment)
            end_s = start_s + start.seconds
            if end_s > moment.kept_s.get(i, math.inf):
                # kept for one before it
                start_s = moment.kept_until_s[i]
                end_s = start_s + start.seconds
            decoding = 0 if view.instances[i].role == "prefill" else view.instances[i].running
            late_s = max(0.0, end_s - prompt.due_s)
            cost = end_s - now + (price + decoding) * start.seconds + LATE_WEIGHT * late_s
            yield Choice(cost, start_s, end_s, (i,), start.prefix, True)

    def _ahead_s(self, instance: int, seconds: float, moment: _Moment) -> float:
        """Return the work in an instance's scheduler that goes before a prompt of so many seconds: not the longer ones,
        unless the instance only prefills and has none."""
        ahead_s, there = moment.ahead(instance), self._on.get(instance)
        if moment.decodes or not there or ahead_s <= _AHEAD_S:
            return ahead_s
        # shortest first: what is left is of the longest
        left_s, longer_s = ahead_s, 0.0
        for name, alone_s in sorted(there.items(), key=lambda each: -each[1]):
            mine_s = min(alone_s, left_s)
            left_s -= mine_s
            longer_s += mine_s if mine_s > seconds else 0.0
            if mine_s <= 0.0:
                del there[name]
        return ahead_s - longer_s

    def _batched(self, prompt: Prompt) -> bool:
        """Return whether a prompt is worth an iteration with others rather than a group."""
        return self._sizing.seconds(prompt, prompt.request.cached_tokens, 1, 1) <= _BATCHED_S

    def _start(self, prompt: Prompt, instance: int, view: ClusterSnapshot) -> PrefixStart:
        """Return how a prompt begins on one instance."""
        if prompt.prefix is None:
            start = PrefixStart(None, self._sizing.seconds(prompt, prompt.request.cached_tokens, 1, 1))
        else:
            start = cheapest_start(prompt.request, prompt.cached, instance, view, self._context)
        relative_s = self._context.relative_s
        if relative_s is None:
            return start
        return start._replace(seconds=start.seconds * relative_s(instance, prompt.request.prompt_tokens))

    def _groups(self, prompt: Prompt, moment: _Moment, view: ClusterSnapshot, least: int) -> Iterator[Choice]:
        """Yield the costs of groups: on what is free and not kept, and before the time until which it is kept."""
        if self._context.whole_prompts or (self._batched(prompt) and least == 1):
            return
        if not moment.decodes:
            least = max(2, least)
        price, tokens = self._price(moment), prompt.request.prompt_tokens
        for kept, free in enumerate(moment.free()):
            for choice in self._sizing.choices(prompt, free, view, price, least):
                if not all(moment.has_room(i, tokens // len(choice.group)) for i in choice.group):
                    continue
                if not kept or choice.end_s <= min(moment.kept_s[i] for i in choice.group):
                    yield choice

    def _price(self, moment: _Moment) -> float:
        """Return how many requests an instance-second keeps waiting, an instance."""
        count = len(moment.ahead_s)
        return (len(self._waiting) + len(self._paused) - 1 + self._arriving.waiting_share(count)) / count

    def _enqueue(
        self, prompt: Prompt, best: Choice, decode: int | None, moment: _Moment, view: ClusterSnapshot
    ) -> list[Action]:
        """Give a prompt to an instance's scheduler."""
        request, (i,) = prompt.request, best.group
        moment.take(best.group, best.end_s, request.prompt_tokens)
        self._leave_queue(request.id)
        self._placed[request.id] = prompt, i
        self._on.setdefault(i, {})[request.id] = best.end_s - best.start_s
        phase: Phase = "all"
        if decode is not None and i not in moment.decodes:
            phase = "prefill"
            self._decodes.place(request, [best.group], view, decode)
        return [EnqueueRequest(request.id, best.group, phase, prefix=best.prefix)]

    def _commit(
        self, prompt: Prompt, best: Choice, decode: int | None, moment: _Moment, view: ClusterSnapshot
    ) -> list[Action]:
        """Give a prompt a group of its own."""
        request, group = prompt.request, view.ordered(best.group)
        moment.take(group, best.end_s, request.prompt_tokens)
        self._leave_queue(request.id)
        self._running[request.id] = RunningGroup(prompt, group, best.end_s)
        if prompt.fastest_s > _DECODE_AHEAD_S:
            self._long.add(request.id)
        start = request.cached_tokens if best.prefix is None else best.prefix.tokens
        strategy = STRIPED if len(group) > 1 else ALONE
        span = Span(request=request, start=start, end=request.prompt_tokens, group=group, strategy=strategy)
        # one transfer at the end: begun with the span it would keep room all the while, also while the group is paused
        self._decodes.place(request, [group], view, decode)
        return [CommitSpans(request.id, (span,), view.version, prefix=best.prefix)]

    def _leave_queue(self, request: str) -> None:
        del self._waiting[request]
        self._ordered_s = -1.0

    # -- pauses -------------------------------------------------------------------------------------------------------

    def _may_pause(self, running: RunningGroup, now: float) -> bool:
        return running.pausable and not running.pausing and running.end_s - now > _LEAST_LEFT_S

    def _pause_for(self, prompt: Prompt, moment: _Moment, wait_s: float) -> list[Action]:
        """Pause the group with the most slack for a prompt that would be late, if both are in time then."""
        now, due_s, tokens = moment.now, prompt.due_s, prompt.request.prompt_tokens
        found: tuple[float, str] | None = None
        for name, running in self._running.items():
            if not self._may_pause(running, now):
                continue
            sizes, cached = self._sizing.sizes(len(running.group)), prompt.request.cached_tokens
            takes_s = min(self._sizing.seconds(prompt, cached, size, 1) for size in sizes)
            slack_s = running.prompt.due_s - running.end_s - takes_s
            fits = all(moment.has_room(i, tokens // len(running.group)) for i in running.group)
            helps = now + takes_s <= due_s and _PAUSE_TIMES * takes_s < wait_s
            if fits and helps and slack_s > 0 and (found is None or slack_s > found[0]):
                found = slack_s, name
        if found is None:
            return []
        self._running[found[1]].pausing = True
        return [PreemptRequest(found[1])]


class _Moment:
    """What is free while prompts are placed one after the other at one time."""

    def __init__(self, view: ClusterSnapshot, ahead_s: dict[int, float], in_groups: Mapping[int, RunningGroup]) -> None:
        """ahead_s: predicted seconds of work of each instance that prefills. in_groups: instances of running groups."""
        self.now, self.view, self.ahead_s, self._in_groups = view.now_s, view, ahead_s, in_groups
        self.decodes = view.with_role("decode")
        self.kept_s: dict[int, float] = {}  # idle instances that a prompt before waits with, until it begins
        self.kept_until_s: dict[int, float] = {}  # when that one will have ended
        self._free: list[FreeInstances] = []  # empty: to be found anew
        self._taken: dict[int, int] = {}  # KV tokens that were given or claimed at this moment

    @property
    def open(self) -> bool:
        """Whether an instance can take a prompt now."""
        if not self.decodes:
            return len(self._in_groups) < len(self.ahead_s)
        return any(ahead_s <= _AHEAD_S and i not in self._in_groups for i, ahead_s in self.ahead_s.items())

    @property
    def next_s(self) -> float:
        """When the next scheduler has little work left: the ends of groups come as events."""
        waits = [ahead_s - _AHEAD_S for i, ahead_s in self.ahead_s.items() if i not in self._in_groups]
        return self.now + min([max(wait_s, _LEAST_WAKE_S) for wait_s in waits if wait_s > 0.0], default=1.0)

    def ahead(self, instance: int) -> float:
        if instance in self.ahead_s:
            return self.ahead_s[instance]
        return max(0.0, self.view.instances[instance].free_at_s - self.now)

    def free_for(self, group: Sequence[int]) -> float:
        """Return when all of a group have nothing to do before it."""
        return max(max(self.now + self.ahead_s.get(i, 0.0), self.kept_until_s.get(i, 0.0)) for i in group)

    def free(self) -> list[FreeInstances]:
        """Return what groups may be made of: instances in order of when they are free, whose schedulers are empty then;
        and those that are kept for a group which begins later."""
        if not self._free:
            free_s = {
                i: max(self.now + ahead_s, self.kept_until_s.get(i, 0.0))
                for i, ahead_s in self.ahead_s.items()
                if self.decodes or not self.view.instances[i].running
            }
            kept = {i: self.now for i in self.kept_s if self.ahead_s[i] <= 0.0}
            self._free = [FreeInstances(self.view, each) for each in ([free_s, kept] if kept else [free_s])]
        return self._free

    def least_size(self, tokens: int) -> int:
        """Return how many instances hold a request of so many tokens, output included, at least."""
        return min(len(self.ahead_s), members_for(tokens, min(self.view.instances[i].capacity for i in self.ahead_s)))

    def make_room(self, prompt: Prompt, size: int) -> None:
        """Keep later prompts from the instances that a prompt without room needs: those with the most."""
        if size == 1:
            self.claim(prompt, self.ahead_s)
            return
        group = sorted(self.ahead_s, key=lambda i: (self.running(i), -self.room(i), i))[:size]
        self.keep(group, self.now, math.inf)

    def running(self, instance: int) -> int:
        """Return the requests in the scheduler of an instance."""
        return self.view.instances[instance].running

    def room(self, instance: int, coming: int = 0) -> float:
        """Return the KV tokens that an instance has room for; infinite on an empty one, where anything is tried.

        coming: tokens of requests that are on their way to it."""
        known = self.view.instances[instance]
        taken = known.used + coming + self._taken.get(instance, 0)
        return known.capacity - taken if known.capacity and taken else math.inf

    def has_room(self, instance: int, tokens: int) -> bool:
        """Return whether the KV of a prompt fits beside what an instance has."""
        return self.room(instance) >= tokens

    def claim(self, prompt: Prompt, among: Iterable[int]) -> None:
        """Keep later prompts from the room of the instance that has the most."""
        most = max(sorted(among), key=self.room)
        self._taken[most] = self._taken.get(most, 0) + prompt.request.prompt_tokens

    def keep(self, group: Sequence[int], start_s: float, end_s: float) -> None:
        """Let a prompt have these instances from `start_s` to `end_s`."""
        self._free = []
        for i in group:
            if i not in self.ahead_s:
                continue
            self.kept_s[i] = min(start_s, self.kept_s.get(i, math.inf))
            self.kept_until_s[i] = max(end_s, self.kept_until_s.get(i, 0.0))

    def take(self, group: Sequence[int], end_s: float, tokens: int) -> None:
        """Let a prompt of so many tokens begin on these instances."""
        self._free = []
        for i in group:
            if i in self.ahead_s:
                self.ahead_s[i] = end_s - self.now
            self._taken[i] = self._taken.get(i, 0) + tokens // len(group)
