"""Groups that share long requests: nothing is lost or computed twice, shards tile each request, every request ends.

A failing seed is named; `grouped_world(seed).run()` repeats it.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.marks import quick_first
from tests.helpers.present import present
from tests.helpers.unit_latency import Linear, small_machine
from tests.scheduling.scheduler_world import World, grouped_world, random_world

from headway.core.batch import RequestProgress
from headway.core.errors import ConfigError, RequestError
from headway.core.request import Request, Slo, Span
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import BatchLoad, load_s
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.groups import GroupedScheduler, make_scheduler
from headway.policy.iteration.medha import MedhaConfig
from headway.policy.iteration.scheduler import Scheduler
from headway.policy.iteration.state import connected, limit_of, shard_tokens


def run(seed: int) -> World:
    try:
        return grouped_world(seed).run()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.parametrize("first", quick_first([50, 0, 100, 150, 200, 250]))
def test_every_request_ends_and_computes_each_token_once_per_admission(first: int) -> None:
    worlds = [run(seed) for seed in range(first, first + 50)]
    assert sum(world.assisted for world in worlds) > 1000
    assert sum(world.lockstep for world in worlds) > 500
    assert {2, 3, 4} <= {world.widest for world in worlds}
    assert sum(world.preempted for world in worlds) > 0


@pytest.mark.long
@pytest.mark.parametrize("first", range(300, 1100, 200))
def test_more_seeds_break_no_rule(first: int) -> None:
    for seed in range(first, first + 200):
        run(seed)


def test_long_requests_that_fill_all_groups_end() -> None:
    """Four of them wait for each other's blocks: what the youngest gives up is for the oldest."""
    world = grouped_world(978)
    world.limit = 20_000
    world.run()


@pytest.mark.parametrize("seed", quick_first(range(0, 30, 3), 3))
def test_the_same_seed_gives_the_same_batches_and_events_byte_for_byte(seed: int) -> None:
    assert run(seed).log == run(seed).log


@pytest.mark.parametrize("seed", quick_first(range(0, 60, 2), 10))
def test_one_group_decides_as_a_plain_scheduler(seed: int) -> None:
    one, two = random_world(seed), random_world(seed, grouped=True)
    one.ahead = two.ahead = 1
    assert one.run().log == two.run().log


@given(st.integers(0, 10_000), st.integers(2, 4))
def test_groups_with_shorts_only_decide_as_separate_schedulers(seed: int, groups: int) -> None:
    """So they are never slower than these: what each group does, and when, is the same."""
    rng = random.Random(seed)
    config = SchedulerConfig(t_target_s=0.01, max_num_seqs=8, kv_parallel=groups)
    model = small_machine()
    grouped = GroupedScheduler(config, model, [BlockManager(640, 16) for _ in range(groups)])
    alone = [Scheduler(config, model, BlockManager(640, 16)) for _ in range(groups)]
    now, left, flying = 0.0, {}, []
    for step in range(60):
        now += rng.expovariate(100.0)
        if step < 30:
            request = Request(
                id=f"r{step}", arrival_s=now, prompt_tokens=rng.randint(1, 300), max_output_tokens=rng.randint(1, 40)
            )
            left[request.id] = request.max_output_tokens
            grouped.add(Span.whole(request), now)
            home = next(group.group for group in grouped.groups if request.id in group)
            alone[home].add(Span.whole(request), now)
        while (batch := grouped.schedule(now)) is not None:
            (part,) = batch.parts
            twin = present(alone[part.group].schedule(now))
            assert msgspec.structs.replace(twin.parts[0], group=part.group) == part
            assert twin.predicted_s == batch.predicted_s
            flying.append((batch, twin, part))
        if flying:
            batch, twin, part = flying.pop(rng.randrange(len(flying)))
            ended = []
            for name in (*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)):
                left[name] -= 1
                ended += [RequestProgress(name, 1, True)] * (left[name] == 0)
            assert grouped.complete(batch.id, ended, now) == alone[part.group].complete(twin.id, ended, now)


# -- one request, by hand -----------------------------------------------------------------------------------------


def three_groups(stages: int = 1, **fields: object) -> GroupedScheduler:
    """Groups of 256 tokens, shards of 64; 1 ms a row and 100 ms an iteration."""
    config = SchedulerConfig.named(
        "default", policy="fcfs", medha=MedhaConfig(long_tokens=60, space_sharing=False), t_target_s=0.1,
        kv_parallel=3, stages=stages, kv_shard_tokens=70, **fields,
    )  # fmt: skip
    return GroupedScheduler(config, Linear(row_s=0.001), [BlockManager(256, 16) for _ in range(3)])


def request(name: str, prompt: int, output: int = 8, tbt_s: float | None = None) -> Span:
    slo = Slo(tbt_s=tbt_s)
    return Span.whole(Request(id=name, arrival_s=0.0, prompt_tokens=prompt, max_output_tokens=output, slo=slo))


def parts(scheduler: GroupedScheduler, now: float, ended: tuple[str, ...] = ()) -> list[tuple[object, ...]]:
    """The next batch, carried out: per part (group, decodes, chunks, assists)."""
    batch = present(scheduler.schedule(now))
    scheduler.complete(batch.id, [RequestProgress(name, 1, True) for name in ended], now)
    scheduler.check()
    return [
        (
            part.group,
            part.decodes.members,
            [(chunk.start, chunk.tokens, chunk.base) for chunk in part.prefills],
            [(assist.rows, assist.owner, assist.start, assist.tokens) for assist in part.assists],
        )
        for part in batch.parts
    ]


def test_groups_join_as_a_prompt_grows_and_shard_holders_attend() -> None:
    scheduler = three_groups()
    scheduler.add(request("a", 150), 0.0)
    assert scheduler.lockstep_groups() == [(0,), (1,), (2,)]
    assert parts(scheduler, 0.0) == [(0, (), [(0, 64, 0)], [])]
    assert parts(scheduler, 0.1) == [(0, (), [], [(64, 1, 0, 64)]), (1, (), [(64, 64, 64)], [])]
    assert scheduler.lockstep_groups() == [(0, 1), (2,)]
    last = parts(scheduler, 0.2)
    assert last == [
        (0, (), [], [(22, 2, 0, 64)]),
        (1, (), [], [(22, 2, 64, 64)]),
        (2, (), [(128, 22, 128)], []),
    ]
    assert parts(scheduler, 0.3, ended=("a",)) == [
        (0, (), [], [(1, 2, 0, 64)]),
        (1, (), [], [(1, 2, 64, 64)]),
        (2, ("a",), [], []),
    ]
    assert scheduler.idle
    assert scheduler.lockstep_groups() == [(0,), (1,), (2,)]
    assert [block_manager.free_blocks for block_manager in scheduler.block_managers] == [16, 16, 16]


def test_decode_moves_to_the_next_group_when_its_shard_is_full() -> None:
    scheduler = three_groups()
    scheduler.add(request("a", 63, output=4), 0.0)
    parts(scheduler, 0.0)
    assert parts(scheduler, 0.1) == [(0, ("a",), [], [])]
    assert parts(scheduler, 0.2) == [(0, (), [], [(1, 1, 0, 64)]), (1, ("a",), [], [])]


def test_group_outside_lockstep_runs_freely_and_gets_new_requests() -> None:
    scheduler = three_groups()
    scheduler.add(request("long", 140), 0.0)
    parts(scheduler, 0.0)
    scheduler.add(request("chat", 5), 0.1)
    long = present(scheduler.schedule(0.1))
    chat = present(scheduler.schedule(0.1))
    assert [part.group for part in long.parts] == [0, 2]
    assert [(part.group, part.prefills[0].request) for part in chat.parts] == [(1, "chat")]
    assert scheduler.schedule(0.1) is None
    scheduler.complete(chat.id, [], 0.11)
    assert [part.group for part in scheduler.schedule(0.11).parts] == [1]


def test_lockstep_groups_wait_until_all_are_free() -> None:
    scheduler = three_groups(stages=2)
    scheduler.add(request("long", 140), 0.0)
    assert scheduler.schedule(0.0, free={1, 2}) is None
    first = present(scheduler.schedule(0.0, free={0}))
    assert scheduler.schedule(0.0, free={0, 2}) is None, "the next chunk is group 1's, which is not free"
    second = present(scheduler.schedule(0.0, free={0, 1}))
    assert [part.group for part in second.parts] == [0, 1]
    assert [event.kind for event in scheduler.abort("long", 0.0)] == []
    assert [event.kind for event in scheduler.complete(first.id, [], 0.1)] == ["started"]
    assert [event.kind for event in scheduler.complete(second.id, [], 0.2)] == ["aborted"]
    scheduler.check()
    assert [block_manager.free_blocks for block_manager in scheduler.block_managers] == [16, 16, 16]


def test_shortest_tbt_target_bounds_all_lockstep_groups() -> None:
    scheduler = three_groups()
    scheduler.add(request("long", 180), 0.0)
    parts(scheduler, 0.0)
    scheduler.add(request("x", 4, tbt_s=1.0), 0.1)  # group 1, where nothing waits
    scheduler.add(request("chat", 4, tbt_s=0.02), 0.1)
    for at in range(1, 20):
        batch = present(scheduler.schedule(0.1 * at))
        done = [p.decodes.members for p in batch.parts]
        if at > 4 and len(batch.parts) > 1 and any("chat" in members for members in done):
            assert batch.predicted_s <= 0.0201
        scheduler.complete(batch.id, [], 0.1 * at)


def test_request_that_fits_all_groups_together_is_served_and_larger_is_refused() -> None:
    scheduler = three_groups()
    scheduler.add(request("most", 760, output=9), 0.0)
    with pytest.raises(RequestError, match="KV cache"):
        scheduler.add(request("more", 769), 0.0)
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(request("most", 10), 0.0)
    for at in range(100):
        batch = scheduler.schedule(0.1 * at)
        if batch is None:
            break
        names = [name for part in batch.parts for name in part.decodes.members]
        scheduler.complete(batch.id, [RequestProgress(n, 1, True) for n in names if at > 14], 0.1 * at)
    assert scheduler.idle


def test_shard_limits_are_whole_blocks_and_equal_shares() -> None:
    model = small_machine()
    config = SchedulerConfig(t_target_s=0.01, kv_parallel=2)
    derived = shard_tokens(config, model, BlockManager(100_000, 16))
    assert derived % 16 == 0
    assert load_s(model, BatchLoad(1, 1, derived)) <= 0.01 < load_s(model, BatchLoad(1, 1, derived + 16))
    assert shard_tokens(SchedulerConfig(kv_shard_tokens=5), model, BlockManager(640, 16)) == 16
    assert shard_tokens(SchedulerConfig(kv_shard_tokens=5000), model, BlockManager(640, 16)) == 640
    whole = Request(id="a", arrival_s=0, prompt_tokens=60, max_output_tokens=5)
    assert limit_of(whole, 64, 2, 16) > 1 << 60
    assert limit_of(msgspec.structs.replace(whole, prompt_tokens=61), 64, 2, 16) == 64
    assert limit_of(msgspec.structs.replace(whole, prompt_tokens=300), 64, 2, 16) == 160


def test_each_group_needs_a_kv_pool() -> None:
    with pytest.raises(ConfigError, match="kv_parallel is 2 and there are 1"):
        make_scheduler(SchedulerConfig(kv_parallel=2), small_machine(), [BlockManager(64, 16)])
    assert isinstance(make_scheduler(SchedulerConfig(), small_machine(), [BlockManager(64, 16)]), Scheduler)


@given(st.lists(st.sets(st.integers(0, 5), min_size=2), max_size=5))
def test_lockstep_groups_are_connected_components(spread: list[set[int]]) -> None:
    crews = connected(6, spread)
    assert sorted(group for crew in crews for group in crew) == list(range(6))
    assert all(any(holders <= set(crew) for crew in crews) for holders in spread)
    for crew in crews:  # and no larger: each member of a crew shares a request with the rest of it
        for group in crew if len(crew) > 1 else ():
            assert any(group in holders and holders & (set(crew) - {group}) for holders in spread)
