"""What a scheduler inside vLLM tells controllers of its learned times."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from tests.helpers.unit_latency import small_machine

from headway.perf.latency.base import BatchLoad, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.policy.hosted.report import PrefillReport
from headway.policy.iteration.config import SchedulerConfig


def test_reported_times_grow_with_the_prompt_and_follow_what_is_learned() -> None:
    latency = CorrectedLatency(small_machine(), 0.3)
    report = PrefillReport(latency, SchedulerConfig(), 5000)
    before = report.points()
    assert [tokens for tokens, _ in before] == [64, 256, 1024, 4096]
    assert all(0 < short < long for (_, short), (_, long) in pairwise(before))
    for _, past, tokens in product(range(5), range(0, 64_000, 4000), (16, 64, 512, 2048)):
        load = BatchLoad().with_chunk(tokens, latency.attention_s(past, tokens), past)
        alone = BatchLoad().with_chunk(tokens, small_machine().attention_s(past, tokens), past)
        latency.observe(load, 3 * load_s(small_machine(), alone))
    for (_, old), (_, new) in zip(before, report.points(), strict=True):
        assert new == pytest.approx(3 * old, rel=0.08)
