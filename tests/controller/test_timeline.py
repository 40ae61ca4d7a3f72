"""The time line: extending it by a commit gives the same times as laying out all entries again."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.entries import CLOSE_S, FreeTimes, InstanceQueues, QueueEntry

INSTANCES, LAYERS = 6, 4


class Work(QueueEntry):
    """A span, or a request on its way to a scheduler, of so many predicted seconds."""

    __slots__ = ("seconds",)

    def __init__(self, name: str, group: tuple[int, ...], seconds: float, after: Work | None, kind: str) -> None:
        super().__init__("scheduler" if kind == "scheduler" else "span", name, group, after)
        self.seconds = seconds

    def remaining_s(self, layers: int) -> float:
        assert layers == LAYERS
        return self.seconds


class World:
    """Instance queues on which entries begin as soon as they are ready; time goes from one end to the next. noise:
    largest relative error of predictions."""

    def __init__(self, seed: int, noise: float) -> None:
        self.chance, self.noise, self.now = random.Random(seed), noise, 0.0
        self.queues = InstanceQueues(i // 2 for i in range(INSTANCES))
        self.busy = [0.0] * INSTANCES
        self.timeline = FreeTimes(self.queues, LAYERS, lambda entry: max(self.busy[i] for i in entry.group))
        self.ends: list[tuple[float, int, Work]] = []
        self.count = 0

    def commit(self) -> None:
        before = None
        for _ in range(self.chance.choice((1, 1, 1, 2, 3))):
            self.count += 1
            group = self.queues.ordered(self.chance.sample(range(INSTANCES), self.chance.choice((1, 1, 2, 3, 6))))
            kind = "scheduler" if before is None and self.chance.random() < 0.1 else "span"
            work = Work(
                f"r{self.count}", group, self.chance.choice((0.0, 1.0, self.chance.uniform(0.1, 5))), before, kind
            )
            self.queues.append(work)
            self.timeline.extend(work, self.now)
            before = work if kind == "span" else None

    def begin(self) -> None:
        """Begin all entries that are ready."""
        again = True
        while again:
            again = False
            for entry in self.queues.candidates(range(INSTANCES)):
                if entry.state != "waiting" or not self.queues.ready(entry):
                    continue
                assert isinstance(entry, Work)
                self.queues.start(entry)
                again = True
                if entry.kind == "span":
                    takes_s = entry.seconds * (1.0 + self.noise * self.chance.uniform(-1, 1))
                    self.ends.append((self.now + takes_s, self.count, entry))
                    if self.timeline.started(entry, self.now):
                        self.relayout()
                else:
                    for i in entry.group:  # it computes there beside what is in the queues
                        self.busy[i] = max(self.busy[i], self.now) + entry.seconds
                    self.relayout()

    def end(self) -> None:
        """Let time pass to the end of the next span."""
        if not self.ends:
            return
        self.ends.sort(key=lambda one: one[:2])
        self.now, _, entry = self.ends.pop(0)
        self.queues.finish(entry)
        if self.timeline.finished(entry, self.now):
            self.relayout()

    def relayout(self) -> None:
        before = [max(at, self.now) for at in self.timeline.free_s]
        changed = set(self.timeline.relayout(self.now))
        # free times in the past count as now: they are no change
        assert changed == {i for i in range(INSTANCES) if self.timeline.free_s[i] != before[i]}

    def planned(self) -> dict[str, float]:
        entries = {e.owner: e.planned_s for queue in self.queues.waiting for e in queue}
        return entries | {e.owner: e.planned_s for e in self.queues.running if e is not None}

    def same(self) -> None:
        """Check that a new layout changes no time."""
        free, planned = [max(at, self.now) for at in self.timeline.free_s], self.planned()
        self.timeline.relayout(self.now)
        assert all(abs(a - b) <= CLOSE_S for a, b in zip(self.timeline.free_s, free, strict=True))
        assert self.planned().keys() == planned.keys()
        for name, at in self.planned().items():
            # each `started` and `finished` may leave an error of CLOSE_S
            assert abs(at - planned[name]) <= 2 * CLOSE_S, name


@settings(max_examples=150)
@given(st.integers(0, 1 << 30))
def test_extending_the_time_line_equals_laying_it_out_again(seed: int) -> None:
    world = World(seed, 0.0)
    for _ in range(40):
        (world.commit if world.chance.random() < 0.55 else world.end)()
        world.begin()
        world.same()


@settings(max_examples=100)
@given(st.integers(0, 1 << 30))
def test_no_entry_is_planned_before_its_predecessors_end(seed: int) -> None:
    world = World(seed, 0.5)
    for _ in range(40):
        (world.commit if world.chance.random() < 0.55 else world.end)()
        world.begin()
        world.relayout()
        queues, free = world.queues, world.timeline.free_s
        for i, queue in enumerate(queues.waiting):
            run = queues.running[i]
            at = world.now if run is None else run.planned_s
            for entry in queue:
                assert isinstance(entry, Work)
                assert entry.planned_s >= at + entry.seconds - CLOSE_S, "two at once on an instance"
                if entry.after is not None and entry.after.state != "done":
                    assert entry.planned_s >= entry.after.planned_s + entry.seconds - CLOSE_S
                at = entry.planned_s
            assert free[i] == at
    while world.ends or any(queue for queue in world.queues.waiting):
        world.end()
        world.begin()
    world.relayout()
    assert world.timeline.free_s == [world.now] * INSTANCES
