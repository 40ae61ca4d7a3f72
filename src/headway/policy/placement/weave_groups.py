"""Prompts that Weave has committed to groups of instances, and how much time each may still yield to shorter ones.

Medha's space sharing, for work without iterations: a long prefill yields a share of its time to waiting short prompts,
the larger the more relative slack it has. A group computes in lockstep, so that a prompt that enters on one of its
instances delays it as a whole. The group is charged with its predicted delay, and never yields more than its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.policy.placement.view import ClusterSnapshot


class PlacedGroup:
    """A prompt committed to groups of instances. All durations are predicted, all times absolute."""

    __slots__ = ("alone_s", "begun", "deadline_s", "due_s", "end_s", "groups", "index", "pause_intervals_s", "pausing",
                 "request", "starts_s", "tokens", "work_s", "yielded_s")  # fmt: skip

    def __init__(
        self,
        request: str,
        groups: Sequence[tuple[int, ...]],
        starts_s: Sequence[float],
        pause_intervals_s: Sequence[float],
        end_s: float,
        work_s: float,
        alone_s: float,
        deadline_s: float,
        due_s: float,
        tokens: int = 0,
    ) -> None:
        self.request = request
        self.groups = tuple(groups)  # of its spans, nested
        self.starts_s = list(starts_s)  # when each span is to begin
        self.pause_intervals_s = tuple(pause_intervals_s)  # longest time between two pause points, by span
        self.end_s = end_s  # when the first token is expected
        self.work_s = work_s  # time of all spans together
        self.alone_s = alone_s  # time of the whole prompt on one instance
        self.deadline_s = deadline_s  # of the first token
        self.due_s = max(due_s, 1e-9)  # from arrival to the deadline
        self.tokens = tokens  # of the prompt
        self.begun = False  # known to hold KV
        self.index = 0  # of the span that runs or comes next
        self.yielded_s = 0.0
        self.pausing = False  # a preemption is under way

    @property
    def group(self) -> tuple[int, ...]:
        """Group of the span that runs or comes next."""
        return self.groups[self.index]

    @property
    def pause_interval_s(self) -> float:
        """Longest time until the running span can be paused."""
        return self.pause_intervals_s[self.index]

    def slack(self, now: float) -> float:
        """Return the relative slack (Medha §4.1): seconds to spare, known queueing included, over its own work."""
        return (self.deadline_s - max(now, self.end_s)) / max(self.work_s, 1e-9)

    def yieldable_s(self, now: float, least: float, most: float) -> float:
        """Return the seconds that it may still be delayed by; its share of yielding lies between `least` and `most`."""
        share = min(most, max(least, self.slack(now)))
        # a share r of all its time: yielded = r * (work + yielded), so yielded = work * r / (1 - r)
        return self.work_s * share / (1.0 - share) - self.yielded_s

    def delay(self, seconds: float) -> None:
        """Charge a delay: all that is to come begins and ends later."""
        self.yielded_s += seconds
        self.end_s += seconds
        for k in range(self.index, len(self.starts_s)):
            self.starts_s[k] += seconds


class PlacedGroups:
    """All committed prompts that have not ended, and their spans on each instance in the order of the controller's
    queues: that of commitment, but for what was resumed."""

    def __init__(self) -> None:
        self._by_request: dict[str, PlacedGroup] = {}
        # (prompt, number of its span), the next one first
        self._on: dict[int, list[tuple[PlacedGroup, int]]] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def get(self, request: str) -> PlacedGroup | None:
        return self._by_request.get(request)

    def on(self, instance: int) -> Sequence[PlacedGroup]:
        """Return those that run or wait on an instance, in turn."""
        return list(dict.fromkeys(placed for placed, _ in self._on.get(instance, ())))

    def all(self) -> Iterable[PlacedGroup]:
        """Return all, in order of commitment."""
        return self._by_request.values()

    def occupied(self) -> Iterable[int]:
        """Return the instances that have any."""
        return sorted(i for i, spans in self._on.items() if spans)

    def delayed(self, charges: Iterable[tuple[PlacedGroup, float]]) -> Iterable[tuple[PlacedGroup, float]]:
        """Return all prompts that delays of some hold up, and the seconds: what waits behind one on any instance begins
        at most as much later."""
        delays = {placed: seconds for placed, seconds in charges if seconds > 0}
        spreading = list(delays)
        while spreading:
            first = spreading.pop()
            for i in first.groups[-1]:
                queue = self.on(i)
                for behind in queue[queue.index(first) + 1 :][:1]:  # which holds up what is behind itself
                    if delays.get(behind, 0.0) < delays[first]:
                        delays[behind] = delays[first]
                        spreading.append(behind)
        return delays.items()

    def add(self, placed: PlacedGroup) -> None:
        self._by_request[placed.request] = placed
        for index, group in enumerate(placed.groups):
            for i in group:
                self._on.setdefault(i, []).append((placed, index))

    def advance(self, placed: PlacedGroup) -> None:
        """Note that the current span of a prompt is done; it has another one."""
        for i in placed.group:
            self._on[i].remove((placed, placed.index))
        placed.index += 1
        placed.begun = True

    def remove(self, request: str) -> None:
        placed = self._by_request.pop(request, None)
        if placed is not None:
            for i in placed.groups[-1]:
                self._on[i] = [entry for entry in self._on[i] if entry[0] is not placed]

    def resume(self, request: str, view: ClusterSnapshot) -> None:
        """Note that a paused prompt goes on: all of its spans that are left come before everything that waits."""
        placed = self._by_request.get(request)
        if placed is None:
            return
        placed.begun = True
        # What computes stays in front, on the instances of the span that runs.
        others = (each for each in self.all() if each is not placed)
        computes = {i for each in others if each.pausing or self.is_running(each, view) for i in each.group}
        for i in placed.groups[-1]:  # groups are nested: the last one has all instances
            own = [entry for entry in self._on[i] if entry[0] is placed]
            rest = [entry for entry in self._on[i] if entry[0] is not placed]
            # only the span that computes stays in front, not those that its prompt has behind it
            front = int(i in computes)
            self._on[i] = [*rest[:front], *own, *rest[front:]]

    def is_running(self, placed: PlacedGroup, view: ClusterSnapshot) -> bool:
        """Return whether a span of it runs now: it is next on all its instances, and their schedulers are empty."""
        next_one = (placed, placed.index)
        return all(self._on[i][0] == next_one and not view.instances[i].running for i in placed.group)
