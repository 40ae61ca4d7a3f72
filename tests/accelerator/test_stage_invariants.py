"""What must hold of any stage: orderings, lower bounds, monotony, conservation; closed forms equal searches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.accelerator.accel_cases import settings_of, study, works

from headway_research.accelerator.machine import IterationWork
from headway_research.accelerator.operators import OperatorSetting
from headway_research.accelerator.stage import buffer, evaluate, packing_bandwidth, smallest_chunk

MANY = settings(max_examples=150, deadline=None, derandomize=True)
FEW = settings(max_examples=60, deadline=None, derandomize=True)
EPSILON = 1e-9


@MANY
@given(settings_of(), works())
def test_schedules_are_ordered_beat_no_bound_and_fetch_every_byte_once(
    setting: OperatorSetting, work: IterationWork
) -> None:
    """Prefetch takes at most packing's time, and that at most the serial one's; none less than its bytes and its
    arithmetic; and the buffer never overflows."""
    report = evaluate(setting, work)
    prefetch, packing, serial = (report.total_s(mode) for mode in ("prefetch", "packing", "serial"))
    assert prefetch <= packing * (1 + EPSILON) <= serial * (1 + 2 * EPSILON)
    assert report.prefetch.total_s <= report.packing.total_s * (1 + EPSILON)
    for line in (report.packing, report.prefetch, report.prefill, report.decode):
        if line is not None:
            least_s = max(line.hbm_bytes / setting.machine.bandwidth, line.compute_s)
            assert line.total_s >= least_s * (1 - EPSILON)
    assert report.packing.hbm_bytes == report.prefetch.hbm_bytes  # prefetch moves bytes in time, it makes none
    line = report.prefetch
    ahead = sum(slot.prefetched for slot in line.slots)
    decode = [slot for slot in line.slots if slot.op.name == "decode attention"]
    wanted = sum(slot.op.hbm_bytes for slot in decode)
    assert sum(slot.own_bytes for slot in decode) + ahead == pytest.approx(wanted)
    assert ahead == pytest.approx(line.hidden, rel=1e-9, abs=1.0)
    most = max(setting.machine.prefetch_bytes, setting.assumed.ahead_bytes)
    assert all(slot.buffered <= most + 1 for slot in line.slots)
    for slot in line.slots:  # HBM is never asked for more than its time allows
        moved = slot.own_bytes + slot.prefetched
        assert moved <= (slot.end_s - slot.start_s) * setting.machine.bandwidth * (1 + EPSILON) + 1
    assert line.slots[-1].end_s == pytest.approx(line.layer_s)


@FEW
@given(settings_of(), works(), st.sampled_from((1.1, 2.0, 7.0)))
def test_more_buffer_and_more_bandwidth_never_hurt_and_without_a_buffer_prefetch_is_packing(
    setting: OperatorSetting, work: IterationWork, times: float
) -> None:
    on = setting.machine
    without = evaluate(setting._replace(machine=on.with_(prefetch_bytes=0)), work)
    assert without.prefetch.total_s == without.packing.total_s
    base = evaluate(setting, work)
    for changes in (
        {"prefetch_bytes": int(on.prefetch_bytes * times) + (1 << 20)},
        {"bandwidth": on.bandwidth * times},
    ):
        more = evaluate(setting._replace(machine=on.with_(**changes)), work)
        for mode in ("serial", "packing", "prefetch"):
            assert more.total_s(mode) <= base.total_s(mode) * (1 + EPSILON)


@FEW
@given(settings_of(), works())
def test_the_closed_form_of_the_buffer_is_what_a_search_finds(setting: OperatorSetting, work: IterationWork) -> None:
    found = buffer(setting, work)

    def seconds(size: float) -> float:
        return evaluate(
            setting._replace(machine=setting.machine.with_(prefetch_bytes=int(size))), work
        ).prefetch.total_s

    # no buffer is faster than the useful one, and a smaller one is slower
    most = seconds(evaluate(setting, work).layers[0].decode.hbm_bytes + 1)
    assert seconds(found.useful + 1) == pytest.approx(most, rel=1e-12)
    assert found.useful == 0 or seconds(0.999 * found.useful - 1) > most
    if found.smallest is not None:
        roomy = setting.machine.with_(prefetch_bytes=int(found.smallest) + 1)
        line = evaluate(setting._replace(machine=roomy), work).prefetch
        hidden_s = line.layer_s - sum(s.end_s - s.start_s for s in line.slots if s.op.name != "decode attention")
        computing = sum(s.op.compute_s for s in line.slots if s.op.name == "decode attention")
        assert hidden_s == pytest.approx(computing, rel=1e-6, abs=1e-12)


@FEW
@given(settings_of(), works())
def test_packing_alone_needs_the_bandwidth_found_and_no_less(setting: OperatorSetting, work: IterationWork) -> None:
    target_s, found = evaluate(setting, work).prefetch.total_s, packing_bandwidth(setting, work)

    def seconds(bandwidth: float) -> float:
        return evaluate(setting._replace(machine=setting.machine.with_(bandwidth=bandwidth)), work).packing.total_s

    assert found is None or seconds(found) <= target_s * (1 + EPSILON)
    assert found is None or found == setting.machine.bandwidth or seconds(found * 0.999) > target_s


def test_64k_tokens_saturate_below_256_mib() -> None:
    found = buffer(study("paper"), IterationWork(prefill_tokens=1024, decodes=32, kv_tokens=65536))
    assert found.kv == 256 << 20
    assert found.hides
    assert 192 << 20 < (found.smallest or 0) <= 256 << 20


def test_the_smallest_chunk_hides_and_one_token_less_does_not() -> None:
    work = IterationWork(prefill_tokens=1024, decodes=32, kv_tokens=65536)
    chunk = smallest_chunk(study("paper"), work)
    assert chunk is not None
    for tokens, hides in ((chunk, True), (chunk - 1, False)):
        assert buffer(study("paper"), IterationWork(prefill_tokens=tokens, decodes=32, kv_tokens=65536)).hides is hides
