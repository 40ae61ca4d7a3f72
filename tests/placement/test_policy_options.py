"""Settings of policies that make no sense are refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.helpers.cluster_worlds import TETRIS_CONTEXT

from headway.core.errors import ConfigError
from headway.policy.placement.registry import check_options, make_placement, names, options_of


def _numbers() -> list[tuple[str, str, float]]:
    found = []
    for name in names():
        for field, declared in options_of(name).model_fields.items():
            if isinstance(declared.default, float):
                found += [(name, field, -1.0), (name, field, math.nan)]
            elif isinstance(declared.default, int) and not isinstance(declared.default, bool):
                found.append((name, field, -1))
    return found


@pytest.mark.parametrize(("policy", "option", "value"), _numbers())
def test_negative_and_nan_options_are_refused(policy: str, option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"options of {policy}: .*{option}"):
        check_options(policy, {option: value})


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("jsq", {"queue": "length"}, "options of jsq"),
        ("jsq", {"queue": "requests", "affinity": True}, "`affinity` compares work"),
        *((name, {"affinity": True, "mode": "paper"}, "`affinity` is in no paper") for name in ("jsq", "pecsched")),
        ("loongserve", {"prefill": "all"}, "prefill must be 'batched', 'single' or 'greedy'"),
        ("loongserve", {"reserved": 2, "prefill": "greedy"}, "batched or single"),
        ("pecsched", {"long_replicas": "all"}, "long_replicas"),
        ("tetris", {"affinity": True, "mode": "paper"}, "`affinity` is in no paper"),
        ("tetris", {"mode": "quick"}, "mode must be 'default' or 'paper'"),
        ("tetris", {"rate": "fast"}, "rate: .*valid number"),
        ("tetris", {"rate": 0.1, "rates": [[1.0, 0.2]]}, "give one of"),
        ("tetris", {"rate": 1.5}, "rate must be below 1"),
        ("tetris", {"speed": 3}, "speed is not a field; allowed here: mode, affinity, sizes, rate"),
        ("tetra", {}, "unknown placement 'tetra'; known are"),
    ],
)
def test_bad_options_are_named_in_the_error(policy: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(policy, options)


def test_ageing_may_be_turned_off() -> None:
    context = TETRIS_CONTEXT
    assert make_placement("pecsched", context, {"ageing": "off"}).next_wakeup(0.0) is None
