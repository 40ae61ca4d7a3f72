"""Spans begin when their KV has room: what is promised counts until it is there, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.decode_world import RecordingInstances

from headway.control.entries import ControlledRequest, SpanEntry
from headway.control.kv import PATIENCE_S, KvAdmission
from headway.core.request import Request, Span

POOL = 1000


class World:
    def __init__(self, count: int = 2) -> None:
        self.now = 0.0
        registry = RecordingInstances(*[POOL] * count)
        self.stats = [each.stats for each in registry]
        self.rooms = KvAdmission(registry.kv, lambda: self.now)

    def spans(self, name: str, tokens: int, *groups: tuple[int, ...]) -> list[SpanEntry]:
        """A prompt in equal spans on these groups."""
        request = Request(id=name, arrival_s=0.0, prompt_tokens=tokens, max_output_tokens=2)
        controlled = ControlledRequest(request)
        for index, group in enumerate(groups):
            start, end = (tokens * at // len(groups) for at in (index, index + 1))
            span = Span(request=request, start=start, end=end, group=group)
            controlled.entries.append(SpanEntry(controlled, span, index, group, 1.0))
        return controlled.entries

    def shows(self, *used: int) -> None:
        for number, tokens in enumerate(used):
            self.stats[number].kv_tokens_used = tokens


def test_a_begun_span_keeps_its_reservation_until_its_end() -> None:
    world = World()
    (one,) = world.spans("one", 1200, (0, 1))
    (two,) = world.spans("two", 800, (0, 1))
    assert world.rooms.fits(one)
    world.rooms.begun(one)
    assert not world.rooms.fits(two), "600 are promised on each, though nothing is used"
    assert world.rooms.waiting
    world.shows(600, 600)
    world.rooms.done(one)
    assert not world.rooms.fits(two)
    world.shows(500, 500)
    assert world.rooms.fits(two)
    assert not world.rooms.waiting


def test_the_first_span_reserves_for_the_whole_prompt_and_later_spans_need_no_check() -> None:
    world = World()
    first, second = world.spans("grows", 1600, (0,), (0, 1))
    assert world.rooms.fits(first)
    world.rooms.begun(first)
    (other,) = world.spans("other", 300, (1,))
    assert not world.rooms.fits(other), "800 are to come there"
    world.shows(800, 0)
    world.rooms.done(first)
    assert not world.rooms.fits(other)
    assert world.rooms.fits(second)
    world.rooms.begun(second)
    world.shows(800, 600)
    world.rooms.done(second)
    assert world.rooms.fits(other)


def test_a_span_begins_on_an_empty_pool_or_after_the_longest_wait() -> None:
    world = World()
    (large,) = world.spans("large", POOL, (0,))
    assert world.rooms.fits(large), "with the slack it would never fit"
    world.shows(1, 0)
    assert not world.rooms.fits(large)
    world.now = PATIENCE_S
    assert world.rooms.fits(large)


def test_ended_requests_hold_no_reservation() -> None:
    world = World()
    (one,) = world.spans("one", 900, (0,))
    (two,) = world.spans("two", 900, (0,))
    world.rooms.begun(one)
    world.shows(10, 0)
    assert not world.rooms.fits(two)
    world.rooms.forget("two")
    assert not world.rooms.waiting
    world.rooms.forget("one")
    assert world.rooms.fits(two)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.data())
def test_a_span_that_begins_always_has_room(data: st.DataObject) -> None:
    """Instances that take what is promised, and snapshots that come late, but before the end of a span: no pool is ever
    overfull."""
    world = World(3)
    held: dict[str, dict[int, int]] = {}
    running: list[list[SpanEntry]] = []

    def used() -> list[int]:
        return [sum(each.get(i, 0) for each in held.values()) for i in range(3)]

    for turn in range(30):
        act = data.draw(st.sampled_from(["ask", "done", "end", "shows"]))
        if act == "ask":
            group = tuple(sorted(data.draw(st.sets(st.integers(0, 2), min_size=1))))
            entries = world.spans(f"r{turn}", data.draw(st.integers(10, 900)), group)
            if world.rooms.fits(entries[0]):
                world.rooms.begun(entries[0])
                share = -(-entries[0].span.end // len(group))
                held[f"r{turn}"] = dict.fromkeys(group, share)
                running.append(entries)
        elif act == "done" and running:
            entry = running.pop(data.draw(st.integers(0, len(running) - 1)))[0]
            for number in entry.group:
                world.stats[number].kv_tokens_used = used()[number]
            world.rooms.done(entry)
        elif act == "end" and held:
            name = data.draw(st.sampled_from(sorted(held)))
            held.pop(name)
            running = [entries for entries in running if entries[0].owner != name]
            world.rooms.forget(name)
        elif act == "shows":
            world.shows(*used())
        assert max(used()) <= POOL


def test_a_batch_without_its_first_member_is_admitted_for_the_rest() -> None:
    world = World()
    (lead,), (member,), (other,) = (
        world.spans(name, tokens, (0, 1)) for name, tokens in [("a", 900), ("b", 900), ("c", 900)]
    )
    lead.batched_with = [member]
    world.shows(600, 600)
    assert not world.rooms.fits(lead)
    lead.controlled.ended = True
    world.rooms.forget("a")
    assert not world.rooms.fits(lead)
    world.shows(500, 500)
    assert world.rooms.fits(lead)
    world.rooms.begun(lead)
    assert not world.rooms.waiting
    assert not world.rooms.fits(other), "450 of b's are promised on each"
    world.rooms.forget("b")
    assert world.rooms.fits(other), "nothing is kept for anybody"
