from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.sim.workload import TraceRequest
from headway.sim.workload.transforms import RULES, rewrite

PROMPTS = st.lists(st.integers(1, 15_000), min_size=1, max_size=60)


def trace(prompts: list[int]) -> list[TraceRequest]:
    return [TraceRequest(0.5 * i, tokens, 10 + i) for i, tokens in enumerate(prompts)]


@given(PROMPTS, st.sampled_from(sorted(RULES)), st.integers(0, 9))
def test_only_the_longest_prompts_change_and_arrivals_and_outputs_do_not(
    prompts: list[int], rule: str, seed: int
) -> None:
    before = trace(prompts)
    after = rewrite(before, rule, np.random.default_rng(seed))
    assert [(r.arrival_s, r.output_tokens) for r in after] == [(r.arrival_s, r.output_tokens) for r in before]
    for old, new in zip(before, after, strict=True):
        if new.klass == "short":
            assert new.prompt_tokens == old.prompt_tokens
        else:
            assert new.klass == "long"
            assert 100_000 <= new.prompt_tokens <= 500_000
    kept = [old.prompt_tokens for old, new in zip(before, after, strict=True) if new.klass == "short"]
    made = [old.prompt_tokens for old, new in zip(before, after, strict=True) if new.klass == "long"]
    assert not kept or not made or max(kept) <= min(made)


def test_one_in_twenty_is_above_the_95th_percentile() -> None:
    after = rewrite(trace(list(range(1, 1001))), "p95-uniform", np.random.default_rng(0))
    assert sum(r.klass == "long" for r in after) == 50


def test_the_linear_rule_keeps_order_and_ends() -> None:
    after = rewrite(trace([4095, 4096, 9000, 14_050]), "linear-4096", np.random.default_rng(0))
    assert [r.prompt_tokens for r in after][:2] == [4095, 100_000]
    assert 100_000 < after[2].prompt_tokens < after[3].prompt_tokens == 500_000


def test_an_unknown_rule_is_an_error_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match="known are p95-uniform, linear-4096"):
        rewrite([], "p99", np.random.default_rng(0))
