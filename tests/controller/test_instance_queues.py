"""Instance queues under random commits, reservations, pauses and releases: in order, without deadlock, reserved groups
whole."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.entries import InstanceQueues, QueueEntry


class Bustle:
    """Random work on instance queues; each entry is started as soon as it is ready."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.queues = InstanceQueues(i // 4 for i in range(12))
        self.running: list[QueueEntry] = []
        self.unqueued: list[QueueEntry] = []
        self.held: dict[str, tuple[int, ...]] = {}
        self.open = 0
        self.names = 0
        self.starts: dict[int, list[int]] = {i: [] for i in range(12)}

    def group(self) -> tuple[int, ...]:
        return self.queues.ordered(self.rng.sample(range(12), self.rng.choice((1, 2, 4, 8, 12))))

    def step(self) -> None:
        choice = self.rng.random()
        if choice < 0.35:
            self.names += 1
            before = None
            for _ in range(self.rng.choice((1, 1, 2, 3))):
                before = QueueEntry("span", f"r{self.names}", self.group(), before)
                self.queues.append(before)
                self.open += 1
        elif choice < 0.45:
            self.names += 1
            self.queues.append(QueueEntry("hold", f"h{self.names}", self.group()))
            self.open += 1
        elif choice < 0.55 and self.running:
            entry = self.running.pop(self.rng.randrange(len(self.running)))
            self.queues.unqueue(entry)
            self.unqueued.append(entry)
        elif choice < 0.65 and self.unqueued:
            self.queues.push(self.unqueued.pop())
        elif choice < 0.75 and self.held:
            self.release(self.rng.choice(sorted(self.held)))
        elif self.running:
            self.finish(self.rng.randrange(len(self.running)))
        self.settle()

    def release(self, name: str) -> None:
        group = self.held.pop(name)
        assert self.queues.release(name) == tuple(sorted(group))

    def finish(self, index: int) -> None:
        self.queues.finish(self.running.pop(index))

    def settle(self) -> None:
        again = True
        while again:
            again = False
            for entry in self.queues.candidates(range(12)):
                if entry.state == "waiting" and self.queues.ready(entry):
                    assert entry.after is None or entry.after.state == "done"
                    self.queues.start(entry)
                    self.open -= 1
                    again = True
                    if entry.kind == "hold":
                        self.held[entry.owner] = entry.group
                    else:
                        self.running.append(entry)
        self.queues.check()
        for name, group in self.held.items():
            assert all(self.queues.holder[i] == name for i in group), "a hold is whole"


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(0, 1 << 30))
def test_every_queue_entry_gets_its_turn(seed: int) -> None:
    bustle = Bustle(seed)
    for _ in range(120):
        bustle.step()
    # no new work: end everything that runs or is reserved, until no entry waits
    for _ in range(10_000):
        bustle.settle()
        if bustle.unqueued:
            bustle.queues.push(bustle.unqueued.pop())
        elif bustle.running:
            bustle.finish(0)
        elif bustle.held:
            bustle.release(min(bustle.held))
        else:
            break
    assert not any(bustle.queues.waiting), "whoever waits gets its turn once others end"
    assert not any(bustle.queues.running)


def test_resumed_span_is_queued_before_waiting_ones() -> None:
    queues = InstanceQueues([0, 0])
    first, second = QueueEntry("span", "a", (0, 1)), QueueEntry("span", "b", (0,))
    queues.append(first)
    queues.append(second)
    queues.start(first)
    queues.unqueue(first)
    assert queues.ready(second)
    queues.push(first)
    assert not queues.ready(second)
    assert queues.ready(first)
